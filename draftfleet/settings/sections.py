"""The sections of the settings, one per table of the file: each knob with its unit, default and allowed values."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    model_validator,
)

from draftfleet.settings.section import Section

TASKS_END_S = 30.0
"""After a drain, how long a worker's tasks may take to give their batches back."""

WARM_END_S = 20.0
"""After that, how long Celery may take to end before the process is ended."""


class Storage(Section):
    """Where runs live: prompts, samples, checkpoints, drafters. Every node sees the same."""

    url: str = Field(
        default="file://draftfleet-data",
        description="What all nodes share: file://FOLDER, a plain path, or s3://BUCKET/PREFIX.",
    )
    endpoint_url: str | None = Field(
        default=None, description="Address of an S3 store outside AWS: http://HOST:PORT. Unset: AWS' own."
    )
    local_dir: str | None = Field(
        default=None, description="With s3://, a folder of this node in which drafters are trained and exported."
    )
    min_free_gb: NonNegativeFloat = Field(
        default=1, description="With less room than this in the shared folder, in GB, the node pauses. 0: never."
    )


class Queue(Section):
    """The Redis that carries hints and claims."""

    url: SecretStr | None = Field(
        default=None,
        description="redis://user:password@host:port/db; rediss:// with TLS. Unset: the embedded Valkey of "
        "`embedded_dir`.",
    )
    url_file: str | None = Field(default=None, description="File that holds `url`.")
    password: SecretStr | None = Field(
        default=None, description="Password for `url`, as it is, where `url` has none: redis://user@host:port/db."
    )
    password_file: str | None = Field(default=None, description="File that holds `password`.")
    ca_file: str | None = Field(
        default=None,
        description="PEM file of the authority that signed the certificate of Redis. Unset: those that this machine "
        "trusts.",
    )
    cert_file: str | None = Field(
        default=None, description="PEM file of this client's certificate, where Redis wants one."
    )
    key_file: str | None = Field(default=None, description="PEM file of the key of `cert_file`.")
    embedded_dir: str = Field(
        default=".draftfleet", description="Folder of the embedded Valkey: its data, password and address."
    )


class Target(Section):
    """The large model."""

    model: str = Field(default="", description="Name under which the servers serve it. Unset: `path`.")
    path: str = Field(
        default="", description="Folder or hub name of its tokenizer and weights; needed to train and to retokenize."
    )
    context_tokens: PositiveInt | None = Field(
        default=None, description="Longest prompt + completion in tokens. Unset: from the servers, else from `path`."
    )


class Worker(Section):
    """From the queue to a shard: one process per node owns all its servers."""

    servers: list[str] = Field(
        default_factory=list,
        description="Addresses of local inference servers, without /v1; http://HOST:8000-8007 is a range of ports.",
    )
    api_key: SecretStr | None = Field(default=None, description="Sent to the servers as a bearer token.")
    api_key_file: str | None = Field(default=None, description="File that holds `api_key`.")
    api_keys: dict[str, SecretStr] | None = Field(
        default=None, description="Keys of single servers by their address; the others get `api_key`."
    )
    api_keys_file: str | None = Field(
        default=None, description='File that holds `api_keys`: lines like "http://HOST:8000" = "KEY".'
    )
    dialect: str = Field(
        default="auto",
        description="auto, vllm, sglang, sglang-native, llamacpp, llamacpp-native, transformers, ollama or openai.",
    )
    concurrency: PositiveInt | None = Field(
        default=None, description="Requests in flight per server. Unset: adaptive, from what each server shows."
    )
    start_concurrency: PositiveInt = Field(default=16, description="Where an adaptive limit starts.")
    max_concurrency: PositiveInt = Field(default=512, description="The most that an adaptive limit may become.")
    request_timeout_s: PositiveFloat = Field(default=1800, description="Longest wait for one completion, in seconds.")
    connect_timeout_s: PositiveFloat = Field(default=10, description="Longest wait for a connection, in seconds.")
    ready_timeout_s: PositiveFloat = Field(
        default=3600, description="How long a server may load before the worker gives up."
    )
    probe_interval_s: PositiveFloat = Field(default=5, description="Seconds between looks at each server's state.")
    stall_s: PositiveFloat = Field(
        default=90, description="A server whose counters stand still for this long loses what it holds."
    )
    ghost_s: PositiveFloat = Field(
        default=30, description="The same for one that says for this long that it works on nothing."
    )
    checkpoint_interval_s: PositiveFloat = Field(
        default=1, description="Seconds between writes of finished rows to partial/: what a kill -9 may cost."
    )
    drain_s: NonNegativeFloat = Field(
        default=60,
        description="After SIGTERM, seconds that requests in flight may still take. "
        f"The process ends at the latest {TASKS_END_S + WARM_END_S:g} s later: give its supervisor drain_s + 60.",
    )
    max_tries: PositiveInt = Field(default=6, description="Requests per row before a transient fault makes it fail.")
    watermark_batches: PositiveInt = Field(
        default=2, description="Take another batch while fewer rows than this many batches wait."
    )
    max_batches_held: PositiveInt = Field(default=128, description="Batches one process may work on at once.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Where Prometheus reads. 0: any free port. Unset: nowhere."
    )
    metrics_address: str = Field(default="127.0.0.1", description="Loopback: the page needs no login.")

    @property
    def longest_stop_s(self) -> float:
        """From SIGTERM to the end of the process at the latest, with a second or two to spare."""
        return self.drain_s + TASKS_END_S + WARM_END_S + 5

    def key(self, server: str) -> str | None:
        """The bearer token for a server, by its address."""
        keys = {_same(url): key for url, key in (self.api_keys or {}).items()}
        key = keys.get(_same(server), self.api_key)
        return None if key is None else key.get_secret_value()


class Claims(Section):
    """The right to work on a batch."""

    ttl_s: PositiveFloat = Field(default=60, description="A claim not renewed for this long has lapsed.")
    renew_s: PositiveFloat = Field(default=15, description="Seconds between renewals.")
    max_attempts: PositiveInt = Field(
        default=3, description="Lapses without progress before a batch is split, a single row parked."
    )
    sweep_s: PositiveFloat = Field(default=4, description="Seconds between looks for lapsed claims.")
    reconcile_s: PositiveFloat = Field(
        default=120, description="Seconds between looks at the storage for missing batches."
    )
    grace_s: PositiveFloat = Field(
        default=30, description="A published batch may stay unclaimed in an empty queue for this long."
    )
    republish_s: PositiveFloat = Field(
        default=3600, description="A batch not seen for this long is published again in any case."
    )


class Flower(Section):
    """The web page on the workers."""

    address: str = Field(
        default="127.0.0.1", description="Where it listens. It speaks no TLS: from elsewhere, by a tunnel or a proxy."
    )
    port: int = Field(default=5555, ge=0, le=65535, description="0: any free port.")
    user: str = Field(default="draftfleet", pattern=r"^[^:\s]+$", description="Login of who may act.")
    password: SecretStr | None = Field(default=None, description="Of `user`. Unset: made at random and printed.")
    password_file: str | None = Field(default=None, description="File that holds `password`.")
    viewer: str = Field(default="viewer", pattern=r"^[^:\s]+$", description="Login of who may look and not act.")
    viewer_password: SecretStr | None = Field(default=None, description="Of `viewer`. Unset: there is no such login.")
    viewer_password_file: str | None = Field(default=None, description="File that holds `viewer_password`.")
    url_prefix: str = Field(
        default="",
        pattern=r"^([\w.-]+(/[\w.-]+)*)?$",
        description="Path that a proxy serves it under, as `tools/flower`. Empty: its root.",
    )
    max_tasks: PositiveInt = Field(default=10_000, description="Tasks it keeps in memory; the oldest go.")

    @model_validator(mode="after")
    def _tells_its_logins_apart(self) -> Self:
        if self.viewer == self.user:
            raise ValueError(f"viewer and user are both {self.user!r}: give them different names")
        return self


class Logs(Section):
    """What the processes say of their work: to standard error, and to a file that is rotated."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="From which level on this package's events are said. `--debug` says all."
    )
    format: Literal["text", "json"] = Field(default="text", description="json: one object a line, for log collectors.")
    file: str | None = Field(
        default=None,
        description="File of a long-running verb, beside standard error; {verb}, {host} and {pid} are filled in.",
    )
    max_mb: PositiveFloat = Field(default=50, description="A file of this size, in MB, is put aside and begun anew.")
    keep: PositiveInt = Field(default=5, description="Files that were put aside and stay; older ones are removed.")


def _same(url: str) -> str:
    """A server's address in one form: no slash and no /v1 at the end."""
    return url.rstrip("/").removesuffix("/v1")
