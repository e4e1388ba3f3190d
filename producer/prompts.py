"""From a row of any accepted shape to a Prompt: find the conversation, normalise it, take its id, strip the answer.

The id is the hash of the whole normalised conversation, so the same conversation has the same id whether it came as
ShareGPT or OpenAI messages, from JSON Lines or from Parquet, in whatever order. docs/producing.md shows every shape.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from draftfleet import settings
from draftfleet.errors import DataError
from draftfleet.names import Split
from draftfleet.records import Conversation, Prompt, prompt_id

Row = Mapping[str, object]

COLUMNS = ("messages", "conversations", "prompt", "question")
"""Looked for in this order where `producer.column` names none."""

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

SPLITS: dict[str, Split] = {
    "train": "train",
    "heldout": "heldout",
    "held-out": "heldout",
    "held_out": "heldout",
    "test": "heldout",
    "validation": "heldout",
    "valid": "heldout",
    "dev": "heldout",
    "eval": "heldout",
}

_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}

_NOT_WORDS = re.compile(r"[\W_]+")
_ASCII_NOT_WORDS = {code: " " for code in range(128) if _NOT_WORDS.match(chr(code))}
"""The same for texts that are ASCII, ten times as fast."""


class Malformed(Exception):
    """A line that holds no conversation in an accepted shape. Counted and named by line; the rest goes on."""


class Rejected(Exception):
    """A conversation that cannot be asked. `reason` is what it is counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Rules:
    """Which columns are read and how prompts are split."""

    column: str | None
    split_column: str | None
    heldout: float

    @classmethod
    def of(cls, knobs: settings.Producer) -> Self:
        return cls(knobs.column, knobs.split_column, knobs.heldout)

    @property
    def readable(self) -> set[str]:
        """Every column that could be read."""
        named = {name for name in (self.column, self.split_column) if name}
        return {*COLUMNS, "system", "tools", "split"} | named

    def check(self, source: str, columns: Sequence[str]) -> None:
        """Raises DataError if a data set with exactly these columns can hold no prompt."""
        wanted = [name for name in (self.column, self.split_column) if name]
        missing = [name for name in wanted if name not in columns]
        if not missing and (self.column or any(name in columns for name in COLUMNS)):
            return
        raise _unknown_column(source, columns, missing[0] if missing else None)

    def are_met_by(self, row: Row) -> bool:
        """Whether the row has every column that is needed. Null is as good as absent."""
        needed = [name for name in (self.column, self.split_column) if name]
        among = [self.column] if self.column else COLUMNS
        return all(row.get(name) is not None for name in needed) and any(row.get(name) is not None for name in among)


def _unknown_column(source: str, columns: Sequence[str], missing: str | None) -> DataError:
    there = ", ".join(columns) or "none"
    if missing:
        near = difflib.get_close_matches(missing, columns, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        return DataError(
            f"{source} has no column {missing}. Columns that are there: {there}. "
            f"{hint}Name one of them with producer.column or producer.split_column."
        )
    return DataError(
        f"{source} has none of the columns {', '.join(COLUMNS)}. Columns that are there: {there}. "
        "Name the one with the prompts or conversations with producer.column."
    )


def read_prompt(row: Row, rules: Rules) -> Prompt:
    """The prompt of a row. Raises Malformed or Rejected."""
    column = _column(row, rules)
    source = _with_system(conversation(row[column], column), row.get("system"))
    tools = _objects(row.get("tools"), "tools")
    try:
        identity = prompt_id(source, tools)
    except UnicodeEncodeError:
        raise Malformed(f"{column} holds half a surrogate pair, which is no text") from None
    except (TypeError, ValueError) as error:
        raise Malformed(f"{column} or tools hold something that JSON cannot: {error}") from None
    split = _given_split(row, rules) or split_by_hash(identity, rules.heldout)
    return Prompt(identity, split, _askable(source), tools)


def conversation(value: object, column: str = "messages") -> Conversation:
    """The messages behind one value: a text is a user's turn, a list holds OpenAI or ShareGPT messages."""
    if isinstance(value, str) and column in ("messages", "conversations"):
        value = _parsed(value, column)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return [_message(one, number) for number, one in enumerate(cast(list[object], value), 1)]
    raise Malformed(f"{column} is {kind(value)}, neither a text nor a list of messages")


def split_by_hash(identity: str, heldout: float) -> Split:
    """The same prompt falls on the same side in every run, whatever else the data set holds."""
    return "heldout" if int(identity[:16], 16) < heldout * 2**64 else "train"


def overlap_text(messages: Conversation) -> str:
    """The last user turn without case, punctuation and runs of whitespace."""
    text = _text(next(m["content"] for m in reversed(messages) if m["role"] == "user")).casefold()
    spaced = text.translate(_ASCII_NOT_WORDS) if text.isascii() else _NOT_WORDS.sub(" ", text)
    return " ".join(spaced.split()) or " ".join(text.split())


def _column(row: Row, rules: Rules) -> str:
    if rules.column:
        if row.get(rules.column) is None:
            raise Malformed(f"it has no {rules.column}")
        return rules.column
    for column in COLUMNS:
        if row.get(column) is not None:
            return column
    raise Malformed(f"it has none of {', '.join(COLUMNS)}")


def _given_split(row: Row, rules: Rules) -> Split | None:
    column = rules.split_column or "split"
    value = row.get(column)
    if value is None:
        if rules.split_column:
            raise Malformed(f"it has no {column}")
        return None
    split = SPLITS.get(value.strip().casefold()) if isinstance(value, str) else None
    if split is None:
        raise Malformed(f"{column} is {_short(value)}; known are {', '.join(SPLITS)}")
    return split


def _with_system(messages: Conversation, system: object) -> Conversation:
    """The `system` column comes first, unless the conversation begins with a system turn of its own."""
    if system is not None and not isinstance(system, str):
        raise Malformed(f"system is {kind(system)}, not a text")
    if not system or not system.strip() or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _message(value: object, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"message {number} is {kind(value)}, not an object")
    if len(plain := cast(dict[str, object], value)) == 2:  # nearly every message, at a quarter of the time
        role, content = plain.get("role") or plain.get("from"), plain.get("content") or plain.get("value")
        if type(role) is str and type(content) is str and role in ROLES:
            return {"role": ROLES[role], "content": content}
    given = {key: entry for key, entry in cast(dict[str, Any], value).items() if entry is not None}
    role = given.get("role", given.get("from"))
    if not isinstance(role, str):
        raise Malformed(f"message {number} has no role, and no from, that is a text")
    known = ROLES.get(role.strip().casefold())
    if known is None:
        raise Rejected("unknown role", f"message {number} is by {_short(role)}; known are {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": known, "content": _content(given.get("content", given.get("value")), number)}
    if reasoning := given.get("reasoning_content", given.get("reasoning")):
        message["reasoning_content"] = _string(reasoning, f"the reasoning of message {number}")
    if calls := _objects(given.get("tool_calls"), f"tool_calls of message {number}"):
        message["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if key in given:
            message[key] = _string(given[key], f"{key} of message {number}")
    if message["content"] is None and not (known == "assistant" and calls):
        raise Malformed(f"message {number} ({known}) has no content, and no value")
    return message


def _content(value: object, number: int) -> str | list[dict[str, Any]] | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in cast(list[object], value)):
        return cast(list[dict[str, Any]], _without_nulls(cast(object, value)))
    raise Malformed(f"the content of message {number} is {kind(value)}, neither a text nor a list of objects")


def _askable(source: Conversation) -> Conversation:
    """Without the assistant turns at the end: they are the answer, and the target shall give its own."""
    asked = list(source)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    turns = [message for message in asked if message["role"] == "user"]
    if not turns:
        raise Rejected("no user turn", f"of {len(source)} messages none is a user's before the answer")
    if any(
        not turn["content"] or (_only_text(turn["content"]) and not _text(turn["content"]).strip()) for turn in turns
    ):
        raise Rejected("empty prompt", "a user turn holds no text")
    return asked


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)


def _only_text(content: str | list[dict[str, Any]]) -> bool:
    return isinstance(content, str) or all(part.get("type", "text") == "text" for part in content)


def _objects(value: object, what: str) -> list[dict[str, Any]] | None:
    """A list of objects, or the same as JSON text. Nothing where it is empty."""
    if isinstance(value, str):
        value = _parsed(value, what) if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in cast(list[object], value)):
        raise Malformed(f"{what} is {kind(value)}, not a list of objects")
    return cast(list[dict[str, Any]], _without_nulls(cast(object, value)))


def _without_nulls(value: object) -> object:
    """Parquet gives every object every key of its column, null where it has none: null is the same as absent."""
    if isinstance(value, dict):
        entries = cast(dict[str, object], value).items()
        return {key: _without_nulls(entry) for key, entry in entries if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in cast(list[object], value)]
    return value


def _parsed(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what} is a text that is not JSON: {error}") from None


def _string(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{what} is {kind(value)}, not a text")
    return value


def kind(value: object) -> str:
    """As JSON names it."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
