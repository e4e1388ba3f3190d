"""What is kept: the prompt and the sample.

A prompt lies in an immutable prompt shard; a sample is one row of an immutable sample shard. Every row of a batch ends
as one sample with an outcome, so that

    expected samples = ok + truncated + failed + pending
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeGuard, cast

from pydantic_core import PydanticSerializationError, to_json

from draftfleet.errors import ErrorKind, NewerFile
from draftfleet.names import Split

SCHEMA_VERSION = 1
"""Raised when a reader of the old form could misread the new one. Stands in messages, run.json and samples,
and from 2 on in each prompt."""

Outcome = Literal["ok", "truncated", "failed", "unfinished"]
"""`unfinished`: a conversation that goes on, with the turns that it has. It stands in partials, and in no shard."""

IdsSource = Literal["engine", "retokenized", "none"]

Conversation = list[dict[str, Any]]
"""Messages in the OpenAI form: `role`, `content`, and where present `tool_calls`, `tool_call_id`, `name`."""


# Made once: `json.dumps` with any option makes a new one per call.
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_CANONICAL = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An assistant turn that the target has finished, of a conversation that went on after it.

    Its text is message `message` (from 0) of the conversation's messages; here is what a training row needs besides.
    """

    message: int
    finish_reason: str | None = None
    reasoning_source: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    ids_source: IdsSource = "none"
    prompt_tokens: int = -1
    completion_tokens: int = -1
    server: str = ""
    seconds: float = 0.0

    @property
    def ids_match_usage(self) -> bool:
        """As of a sample."""
        return self.ids_source != "none" and len(self.token_ids) == self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An answer that was cut at its length and is to be continued from its exact ids.

    `max_tokens` is the budget of the whole answer, what is there included. The texts are for where no tokenizer can
    make them of all ids.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    max_tokens: int
    reasoning: str | None = None
    reasoning_source: str | None = None
    content: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What we ask. `prompt_id` is the hash of the whole source conversation, so it does not depend on file order.

    `sample` counts from 0 where a prompt is asked several times. `turns` are those that are finished already: their
    answers stand in `messages`. `unfinished` is the answer that is to be continued. `source` is the short name of the
    data set it came from.
    """

    prompt_id: str
    split: Split
    messages: Conversation
    tools: list[dict[str, Any]] | None = None
    sample: int = 0
    turns: list[Turn] = field(default_factory=list[Turn])
    unfinished: Unfinished | None = None
    source: str = ""

    @property
    def row_key(self) -> str:
        """Names the one sample this prompt is owed: `prompt_id`, sample index, turn index."""
        turn = sum(message["role"] == "user" for message in self.messages) - 1
        return f"{self.prompt_id}-{self.sample}-{max(turn, 0)}"

    def to_json(self) -> str:
        """What has its default is left out: an older version reads what it knows."""
        fields = {name: value for name, value in fields_of(self).items() if value or name not in _OPTIONAL_OF_PROMPT}
        fields |= {"turns": [fields_of(turn) for turn in self.turns]} if self.turns else {}
        fields |= {"unfinished": fields_of(self.unfinished)} if self.unfinished else {}
        return compact(fields)

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = _object(line)
        refuse_newer(fields.pop("schema_version", 1))
        if "turns" in fields:
            fields["turns"] = [Turn(**turn) for turn in fields["turns"]]
        if "unfinished" in fields:
            fields["unfinished"] = Unfinished(**fields["unfinished"])
        return cls(**fields)


_OPTIONAL_OF_PROMPT = {"sample", "turns", "unfinished", "source"}


def prompt_id(messages: Conversation, tools: list[dict[str, Any]] | None) -> str:
    """First 16 bytes, in hex, of the SHA-256 of the canonical JSON of the whole source conversation and its tools.

    The source conversation includes the trailing assistant turn that is stripped before asking, so that two rows which
    ask the same and were answered differently stay two prompts.
    """
    return hashlib.sha256(_canonical(messages, tools)).hexdigest()[:32]


def _canonical(messages: Conversation, tools: list[dict[str, Any]] | None) -> bytes:
    """The text of `_CANONICAL`, to the byte. Plain messages, a role and a text each, take a quarter of its time."""
    plain: list[dict[str, str]] = []
    for message in () if tools else messages:
        role, content = message.get("role"), message.get("content")
        if len(message) != 2 or type(role) is not str or type(content) is not str:
            break
        plain.append({"content": content, "role": role})
    if not tools and len(plain) == len(messages):
        try:
            return to_json([plain, []])
        except PydanticSerializationError:
            pass  # half a surrogate pair, which the line below refuses
    return _CANONICAL.encode([messages, tools or []]).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion, or the record of why there is none. The fields are the columns of a shard (docs/samples.md).

    `token_ids` are the completion's, reasoning and stop token included; with `ids_source == "engine"` they are exactly
    what the model produced. `completion_tokens` is the server's own count; -1 where it gave none. A field with a
    default may be missing where an older version wrote the sample.

    A conversation of which every assistant turn is asked is one sample. Its `messages` hold the target's own earlier
    turns, `turns` what a training row needs of each, and all other fields are of the last turn that was asked. `ended`
    says why it is not the last of the source.
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
    sample: int = 0
    drawn: dict[str, Any] | None = None
    turns: list[Turn] = field(default_factory=list[Turn])
    ended: str | None = None
    source: str = ""

    @property
    def ids_match_usage(self) -> bool:
        """Whether the ids are as many as the server says it produced. A row where they are not is never trained on."""
        return self.ids_source != "none" and len(self.token_ids) == self.completion_tokens

    def to_json(self) -> str:
        return compact(fields_of(self) | {"turns": [fields_of(turn) for turn in self.turns]})

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = _object(line)
        refuse_newer(fields.get("schema_version", 1))
        fields["turns"] = [Turn(**turn) for turn in fields.get("turns") or ()]
        return cls(**fields)


def fields_of(record: Prompt | Sample | Turn | Unfinished) -> dict[str, Any]:
    """Shallow: `asdict` copies every message and token id, three times the cost of the JSON itself."""
    return {name: getattr(record, name) for name in record.__slots__}


def is_newer(version: object) -> TypeGuard[int]:
    """Whether it is a version, and one that this draftfleet does not know."""
    return isinstance(version, int) and version > SCHEMA_VERSION


def refuse_newer(version: object) -> None:
    """Raises NewerFile."""
    if is_newer(version):
        raise NewerFile(
            f"it is of schema version {version}, and this draftfleet reads up to version {SCHEMA_VERSION}. Nothing is "
            "wrong with it: use the draftfleet that wrote it, or a newer one."
        )


def _object(line: str) -> dict[str, Any]:
    """Raises ValueError where the line holds anything else."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"{type(fields).__name__} where an object should be")
    return cast(dict[str, Any], fields)


def compact(value: object) -> str:
    return _COMPACT.encode(value)
