"""What travels in the broker: a reference to a batch or a drafter, and never the text of a prompt."""

from __future__ import annotations

from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftfleet.errors import NewerMessage, QueueError
from draftfleet.names import BATCH, NAME
from draftfleet.records import SCHEMA_VERSION, is_newer

LONGEST_SHOWN = 100
"""Characters that an error quotes of a key in a message: whoever wrote it may have meant to fill the log."""


class BatchMessage(BaseModel):
    """The body of a `draftfleet.generate` message: a reference to a batch, under 1 KB."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: int
    run_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    run: str = Field(pattern=NAME)
    batch: str = Field(pattern=BATCH)

    @classmethod
    def parse(cls, body: object) -> Self:
        """Raises NewerMessage, or QueueError on anything else but a message that this worker knows."""
        return _parse(cls, body)


class TrainMessage(BaseModel):
    """The body of a `draftfleet.train` message: which drafter of which run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: int
    run_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    run: str = Field(pattern=NAME)
    drafter: str = Field(pattern=NAME)

    @classmethod
    def parse(cls, body: object) -> Self:
        """Raises NewerMessage, or QueueError on anything else but a message that this trainer knows."""
        return _parse(cls, body)


LATEST = 999
"""No draftfleet will write a higher version: such a message is none of ours, and gets no queue."""

M = TypeVar("M", bound="BatchMessage | TrainMessage")


def _parse(model: type[M], body: object) -> M:
    version = cast(dict[str, Any], body).get("v") if isinstance(body, dict) else None
    if is_newer(version) and version <= LATEST:  # first of all: it may have fields that we do not know
        raise NewerMessage(
            f"messages of version {version} are in the queue, this process reads up to version {SCHEMA_VERSION}: "
            "upgrade it. They wait for a newer one.",
            version,
        )
    try:
        message = model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:LONGEST_SHOWN] or "all of it"
        raise QueueError(
            f"a message in the queue is not a {model.__name__}: {where}: {first['msg']}. It was dropped."
        ) from None
    if message.v != SCHEMA_VERSION:
        raise QueueError(
            f"a message has version {message.v}, this worker reads version {SCHEMA_VERSION}: "
            "run the same draftfleet version on every node."
        )
    return message
