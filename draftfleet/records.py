"""What travels: the message, the prompt, the sample, and the Arrow schema of a sample shard.

A message in the broker names a batch and carries no prompt text. A prompt lies in an immutable prompt shard; a sample
is one row of an immutable sample shard. Every row of a batch ends as one sample with an outcome, so that

    expected samples = ok + truncated + failed + pending
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar, cast

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftfleet.errors import ErrorKind, QueueError
from draftfleet.names import BATCH, NAME, Split

SCHEMA_VERSION = 1
"""Raised when a reader of the old form could misread the new one. Stands in messages, prompt shards and samples."""

LONGEST_SHOWN = 100
"""Characters that an error quotes of a key in a message: whoever wrote it may have meant to fill the log."""

Outcome = Literal["ok", "truncated", "failed"]
IdsSource = Literal["engine", "retokenized", "none"]

Conversation = list[dict[str, Any]]
"""Messages in the OpenAI form: `role`, `content`, and where present `tool_calls`, `tool_call_id`, `name`."""


# Made once: `json.dumps` with any option makes a new one per call.
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_CANONICAL = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)


class BatchMessage(BaseModel):
    """The body of a `draftfleet.generate` message: a reference to a batch, under 1 KB."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: int
    run_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    run: str = Field(pattern=NAME)
    batch: str = Field(pattern=BATCH)

    @classmethod
    def parse(cls, body: object) -> Self:
        """Raises QueueError on anything but a message of a version this worker knows."""
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
        """Raises QueueError on anything but a message of a version this trainer knows."""
        return _parse(cls, body)


M = TypeVar("M", bound="BatchMessage | TrainMessage")


def _parse(model: type[M], body: object) -> M:
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What we ask. `prompt_id` is the hash of the whole source conversation, so it does not depend on file order."""

    prompt_id: str
    split: Split
    messages: Conversation
    tools: list[dict[str, Any]] | None = None

    @property
    def row_key(self) -> str:
        """Names the one sample this prompt is owed: `prompt_id`, sample index, turn index."""
        turn = sum(message["role"] == "user" for message in self.messages) - 1
        return f"{self.prompt_id}-0-{max(turn, 0)}"

    def to_json(self) -> str:
        return _compact(_fields(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        return cls(**json.loads(line))


def prompt_id(messages: Conversation, tools: list[dict[str, Any]] | None) -> str:
    """First 16 bytes, in hex, of the SHA-256 of the canonical JSON of the whole source conversation and its tools.

    The source conversation includes the trailing assistant turn that is stripped before asking, so that two rows which
    ask the same and were answered differently stay two prompts.
    """
    canonical = _CANONICAL.encode([messages, tools or []])
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion, or the record of why there is none. The fields are the columns of a shard (docs/samples.md).

    `token_ids` are the completion's, reasoning and stop token included; with `ids_source == "engine"` they are exactly
    what the model produced. `completion_tokens` is the server's own count; -1 where it gave none. A field with a
    default may be missing where an older version wrote the sample.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    run: str
    batch: str
    row_key: str
    prompt_id: str
    split: Split
    messages: Conversation
    tools: list[dict[str, Any]] | None = None
    outcome: Outcome
    finish_reason: str | None = None
    error: str | None = None
    error_status: int | None = None
    error_kind: ErrorKind | None = None
    reasoning: str | None = None
    reasoning_source: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    ids_source: IdsSource = "none"
    prompt_tokens: int = -1
    completion_tokens: int = -1
    model: str = ""
    server: str = ""
    dialect: str = ""
    worker: str = ""
    attempt: int = 1
    started_at: float = 0.0
    seconds: float = 0.0

    @property
    def ids_match_usage(self) -> bool:
        """Whether the ids are as many as the server says it produced. A row where they are not is never trained on."""
        return self.ids_source != "none" and len(self.token_ids) == self.completion_tokens

    def to_json(self) -> str:
        return _compact(_fields(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        return cls(**json.loads(line))

    def to_row(self) -> dict[str, Any]:
        """The row of a shard: open-ended JSON (tools, tool calls) as text, since Arrow columns have one type."""
        row = _fields(self)
        row["messages"] = [_message_row(message) for message in self.messages]
        row["tools"] = _text(self.tools)
        row["tool_calls"] = _text(self.tool_calls)
        row["ids_match_usage"] = self.ids_match_usage
        return row

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Self:
        row = {key: value for key, value in row.items() if key != "ids_match_usage"}
        row["messages"] = [_message_from_row(message) for message in row["messages"]]
        for key in ("tools", "tool_calls"):
            row[key] = json.loads(row[key]) if row[key] is not None else None
        return cls(**row)


def _fields(record: Prompt | Sample) -> dict[str, Any]:
    """Shallow: `asdict` copies every message and token id, three times the cost of the JSON itself."""
    return {name: getattr(record, name) for name in record.__slots__}


def _text(value: object) -> str | None:
    return None if value is None else _compact(value)


def _compact(value: object) -> str:
    return _COMPACT.encode(value)


MESSAGE_TEXTS = ("role", "content", "reasoning_content", "tool_call_id", "name")
"""Fields of a message that are columns of their own when they hold text; all else lies in `extra`, as JSON."""


def _message_row(message: dict[str, Any]) -> dict[str, Any]:
    texts = {name: message[name] for name in MESSAGE_TEXTS if isinstance(message.get(name), str)}
    rest = {name: value for name, value in message.items() if name not in texts and name != "tool_calls"}
    return texts | {"tool_calls": _text(message.get("tool_calls")), "extra": _text(rest or None)}


def _message_from_row(row: dict[str, Any]) -> dict[str, Any]:
    message = {name: row[name] for name in MESSAGE_TEXTS if row[name] is not None}
    if row["tool_calls"] is not None:
        message["tool_calls"] = json.loads(row["tool_calls"])
    if row["extra"] is not None:
        message.update(cast(dict[str, Any], json.loads(row["extra"])))
    return message


SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("schema_version", pa.int16()),
        pa.field("run_id", pa.string()),
        pa.field("run", pa.string()),
        pa.field("batch", pa.string()),
        pa.field("row_key", pa.string()),
        pa.field("prompt_id", pa.string()),
        pa.field("split", pa.string()),
        pa.field(
            "messages",
            pa.list_(
                pa.struct(
                    [
                        pa.field(name, pa.string())
                        for name in (
                            "role",
                            "content",
                            "reasoning_content",
                            "tool_calls",
                            "tool_call_id",
                            "name",
                            "extra",
                        )
                    ]
                )
            ),
        ),
        pa.field("tools", pa.string()),
        pa.field("outcome", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("error_status", pa.int16()),
        pa.field("error_kind", pa.string()),
        pa.field("reasoning", pa.string()),
        pa.field("reasoning_source", pa.string()),
        pa.field("content", pa.string()),
        pa.field("tool_calls", pa.string()),
        pa.field("prompt_token_ids", pa.list_(pa.int32())),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("ids_source", pa.string()),
        pa.field("ids_match_usage", pa.bool_()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        pa.field("model", pa.string()),
        pa.field("server", pa.string()),
        pa.field("dialect", pa.string()),
        pa.field("worker", pa.string()),
        pa.field("attempt", pa.int16()),
        pa.field("started_at", pa.float64()),
        pa.field("seconds", pa.float64()),
    ]
)
"""The columns of a sample shard, in order."""
