"""[capture]: the servers and the folder through which hidden states come, where trainer.target = vllm."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr

from draftfleet.settings.section import Section


class Capture(Section):
    """Hidden states from serving vLLM engines, where trainer.target = vllm. Nothing of it is pinned."""

    servers: list[str] = Field(
        default_factory=list,
        description="Addresses of the vLLM servers that hand out hidden states, without /v1. They serve nothing else.",
    )
    api_key: SecretStr | None = Field(default=None, description="Sent to these servers as a bearer token.")
    api_key_file: str | None = Field(default=None, description="File that holds `api_key`.")
    folder: str = Field(
        default="",
        description="Where these servers write and this node reads: their `shared_storage_path`, best in memory.",
    )
    spool_gb: PositiveFloat = Field(
        default=16, description="The most, in GB, that lies in `folder` or is asked for, all processes together."
    )
    concurrency: PositiveInt = Field(default=16, description="Requests in flight per server, all processes together.")
    timeout_s: PositiveFloat = Field(default=900, description="Longest wait for the states of one row, in seconds.")
    ready_timeout_s: PositiveFloat = Field(
        default=3600, description="How long servers that do not answer, or fail, are waited for, in seconds."
    )
