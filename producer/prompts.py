"""From a row of any accepted shape to a Prompt: find the conversation, normalise it, take its id, strip the answer.

The id is the hash of the whole normalised conversation, so the same conversation has the same id whether it came as
ShareGPT or OpenAI messages, from JSON Lines or from Parquet, in whatever order. docs/data-sets.md shows every shape.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from draftfleet import settings
from draftfleet.errors import DataError
from draftfleet.names import Split
from draftfleet.records import Conversation, Prompt, prompt_id
from producer.messages import conversation, refuse_media, refuse_missing_content, text_of, tool_definitions
from producer.shapes import MEDIA_COLUMNS, Malformed, Rejected, Row, kind, short

__all__ = ["Malformed", "Rejected", "Row", "Rules", "kind", "overlap_text", "read_prompt"]

COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "question",
    "instruction",
    "problem",
    "query",
    "conversation",
    "turns",
    "input",
)
"""Looked for in this order where `producer.column` names none."""

BESIDE = {"instruction": ("input", "context")}
"""Columns whose text belongs to the question, below it."""

SYSTEM = ("system", "system_prompt")
LANGUAGE = ("language", "lang")

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

_NOT_WORDS = re.compile(r"[\W_]+")
_ASCII_NOT_WORDS = {code: " " for code in range(128) if _NOT_WORDS.match(chr(code))}
"""The same for texts that are ASCII, ten times as fast."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Which columns are read, how prompts are split, and what they are said to come from."""

    column: str | None
    split_column: str | None
    heldout: float
    language_column: str | None = None
    by_language: bool = False
    turns: Literal["last", "all"] = "last"
    source: str = ""

    @classmethod
    def of(cls, source: settings.Source, knobs: settings.Producer) -> Self:
        heldout = knobs.heldout if source.heldout is None else source.heldout
        language = source.language_column if source.languages else None
        return cls(
            source.column, knobs.split_column, heldout, language, bool(source.languages), knobs.turns, source.name
        )

    @property
    def _named(self) -> dict[str, str]:
        """The columns that a knob names, by knob."""
        knobs = {"column": self.column, "split_column": self.split_column, "language_column": self.language_column}
        return {name: f"producer.{knob}" for knob, name in knobs.items() if name}

    @property
    def readable(self) -> set[str]:
        """Every column that could be read."""
        beside = {name for names in BESIDE.values() for name in names}
        return {*COLUMNS, *beside, *SYSTEM, *LANGUAGE, *MEDIA_COLUMNS, "tools", "split", *self._named}

    def check(self, source: str, columns: Sequence[str]) -> None:
        """Raises DataError if a data set with exactly these columns can hold no prompt."""
        missing = [name for name in self._named if name not in columns]
        if missing:
            raise _unknown_column(source, columns, missing[0], self._named)
        if not self.column and not any(name in columns for name in COLUMNS):
            raise DataError(
                f"{source} has none of the columns {', '.join(COLUMNS)}. Columns that are there: {_there(columns)}. "
                "Name the one with the prompts or conversations with producer.column."
            )

        if self.by_language and not self.language_column and not any(name in columns for name in LANGUAGE):
            raise DataError(
                f"{source} has none of the columns {', '.join(LANGUAGE)}, and producer.languages is set. Columns that "
                f"are there: {_there(columns)}. Name the one with the language with producer.language_column."
            )

    def are_met_by(self, row: Row) -> bool:
        """Whether the row has every column that is needed. Null is as good as absent."""
        among = [self.column] if self.column else COLUMNS
        has_all = all(row.get(name) is not None for name in self._named)
        return has_all and any(row.get(name) is not None for name in among)


def _there(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "none"


def _unknown_column(source: str, columns: Sequence[str], missing: str, named: dict[str, str]) -> DataError:
    near = difflib.get_close_matches(missing, columns, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return DataError(
        f"{source} has no column {missing}. Columns that are there: {_there(columns)}. "
        f"{hint}Name one of them with {named[missing]}."
    )


def read_prompt(row: Row, rules: Rules) -> Prompt:
    """The prompt of a row. Raises Malformed or Rejected."""
    column = _column(row, rules)
    messages = conversation(row[column], column, every_turn=rules.turns == "all")
    source = _with_system(_with_beside(messages, row, column), row)
    refuse_media(row, source)
    tools = tool_definitions(row.get("tools"))
    try:
        identity = prompt_id(source, tools)
    except UnicodeEncodeError:
        raise Malformed(f"{column} holds half a surrogate pair, which is no text") from None
    except (TypeError, ValueError) as error:
        raise Malformed(f"{column} or tools hold something that JSON cannot: {error}") from None
    split = _given_split(row, rules) or split_by_hash(identity, rules.heldout)
    return Prompt(identity, split, _askable(source), tools, source=rules.source)


def split_by_hash(identity: str, heldout: float) -> Split:
    """The same prompt falls on the same side in every run, whatever else the data set holds."""
    return "heldout" if int(identity[:16], 16) < heldout * 2**64 else "train"


def last_user_text(messages: Conversation) -> str:
    return text_of(next(m["content"] for m in reversed(messages) if m["role"] == "user"))


def overlap_text(messages: Conversation) -> str:
    """The last user turn without case, punctuation and runs of whitespace."""
    text = last_user_text(messages).casefold()
    spaced = text.translate(_ASCII_NOT_WORDS) if text.isascii() else _NOT_WORDS.sub(" ", text)
    return " ".join(spaced.split()) or " ".join(text.split())


def language_of(row: Row, rules: Rules) -> str:
    """What the row says of its language; empty where it says nothing."""
    among = (rules.language_column,) if rules.language_column else LANGUAGE
    value = next((row[name] for name in among if row.get(name) is not None), "")
    return str(value).strip().casefold()


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
        raise Malformed(f"{column} is {short(value)}; known are {', '.join(SPLITS)}")
    return split


def _with_beside(messages: Conversation, row: Row, column: str) -> Conversation:
    """An instruction with what it is about: the text of the column beside it, below its own."""
    beside = next((row[name] for name in BESIDE.get(column, ()) if row.get(name)), None)
    if not isinstance(row[column], str) or not isinstance(beside, str) or not beside.strip():
        return messages
    return [{"role": "user", "content": f"{row[column]}\n\n{beside}"}]


def _with_system(messages: Conversation, row: Row) -> Conversation:
    """The `system` column comes first, unless the conversation begins with a system turn of its own."""
    name = next((name for name in SYSTEM if row.get(name) is not None), SYSTEM[0])
    system = row.get(name)
    if system is not None and not isinstance(system, str):
        raise Malformed(f"{name} is {kind(system)}, not a text")
    if not system or not system.strip() or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _askable(source: Conversation) -> Conversation:
    """Without the assistant turns at the end: they are the answer, and the target shall give its own."""
    asked = list(source)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    refuse_missing_content(asked)
    turns = [message for message in asked if message["role"] == "user"]
    if not turns:
        raise Rejected("no user turn", f"of {len(source)} messages none is a user's before the answer")
    if any(not turn["content"] or not text_of(turn["content"]).strip() for turn in turns):
        raise Rejected("empty prompt", "a user turn holds no text")
    return [message if message["content"] is not None else _without_null_content(message) for message in asked]


def _without_null_content(message: dict[str, Any]) -> dict[str, Any]:
    """A turn that ended inside its thought has said nothing. Beside a tool call null is what the API wants."""
    return message if message.get("tool_calls") else message | {"content": ""}
