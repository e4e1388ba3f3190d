"""What is exported of a sample: its training rows one by one, or its conversation up to the last answer of the target.

A line never holds text and ids that differ: ids are those of the sample, and no text is tokenized here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from draftfleet.names import Split
from draftfleet.records import SAMPLE_SCHEMA, Conversation, Outcome, Sample, message_row
from draftfleet.training_rows import TurnRow, rows_of

JSON = dict[str, Any]
Turns = Literal["rows", "conversations"]
Reasoning = Literal["field", "inline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to export. `limit` is of each split."""

    format: str = "parquet"
    splits: tuple[Split, ...] = ("train", "heldout")
    outcomes: tuple[Outcome, ...] = ("ok", "truncated")
    exact: bool = False
    turns: Turns = "rows"
    reasoning: Reasoning = "field"
    limit: int | None = None
    file_mb: int = 512


@dataclass(frozen=True, slots=True)
class Unit:
    """What becomes one line: the last of these rows with what came before it. Of a training row there is one."""

    sample: Sample
    rows: list[TurnRow]

    @property
    def last(self) -> TurnRow:
        return self.rows[-1]

    @property
    def key(self) -> str:
        return self.last.key if len(self.rows) == 1 else self.sample.row_key


def units_of(sample: Sample, wanted: Wanted, *, needs_ids: bool, left_out: Counter[str]) -> Iterator[Unit]:
    """In the order of the conversation. What is left out is counted by reason.

    A conversation ends before its first answer that is not wanted: its later ones rest on it.
    """
    rows = rows_of(sample)
    if sample.outcome == "failed":
        left_out["failed"] += 1
    kept: list[TurnRow] = []
    for row in rows:
        if reason := _reason(row, wanted, needs_ids=needs_ids):
            left_out[reason] += 1
            if wanted.turns == "conversations":
                break
        elif wanted.turns == "rows":
            yield Unit(sample, [row])
        else:
            kept.append(row)
    if kept:
        yield Unit(sample, kept)


def _reason(row: TurnRow, wanted: Wanted, *, needs_ids: bool) -> str | None:
    """Why a row is not exported; None where it is."""
    if row.outcome not in wanted.outcomes:
        return row.outcome
    if needs_ids and not (row.prompt_token_ids and row.token_ids):
        return "no ids"
    if (needs_ids or wanted.exact) and not row.ids_match_usage:
        return "ids differ from usage"
    if wanted.exact and row.ids_source != "engine":
        return "ids not exact"
    return None


def ids_and_mask(row: TurnRow) -> tuple[list[int], list[int]]:
    """The ids as the model saw and wrote them, and 1 where it wrote: reasoning and stop token included."""
    return row.prompt_token_ids + row.token_ids, [0] * len(row.prompt_token_ids) + [1] * len(row.token_ids)


def conversation(unit: Unit, reasoning: Reasoning) -> Conversation:
    """The messages with the target's answer as the last one. The answer's thought is its `reasoning_content`."""
    row = unit.last
    answer: JSON = {"role": "assistant", "content": row.content or ""}
    if row.reasoning:
        answer["reasoning_content"] = row.reasoning
    if row.tool_calls:
        answer["tool_calls"] = row.tool_calls
    return _messages([*row.messages, answer], reasoning)


def _messages(messages: Conversation, reasoning: Reasoning) -> Conversation:
    return messages if reasoning == "field" else [_inlined(message) for message in messages]


def _inlined(message: JSON) -> JSON:
    """A message with its thought in the content, between the marks that most templates use."""
    thought = message.get("reasoning_content")
    if not thought:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return rest | {"content": f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}"}


def line_of(unit: Unit, wanted: Wanted) -> JSON:
    """The fields of a line, in order, as JSON has them."""
    sample, row = unit.sample, unit.last
    head: JSON = {"key": unit.key, "prompt_id": sample.prompt_id, "sample": sample.sample, "split": sample.split}
    tail: JSON = {"drawn": sample.drawn, "source": getattr(sample, "source", None), "model": sample.model}
    if wanted.turns == "conversations":
        return {
            **head,
            "messages": conversation(unit, wanted.reasoning),
            "tools": sample.tools,
            "answers": len(unit.rows),
            "outcome": row.outcome,
            "finish_reason": row.finish_reason,
            **tail,
        }
    reasoning, content = row.reasoning, row.content
    if wanted.reasoning == "inline" and reasoning:
        reasoning, content = None, _inlined({"reasoning_content": reasoning, "content": content})["content"]
    return {
        **head,
        "turn": row.turn,
        "messages": _messages(row.messages, wanted.reasoning),
        "tools": sample.tools,
        "reasoning": reasoning,
        "content": content,
        "tool_calls": row.tool_calls,
        "outcome": row.outcome,
        "finish_reason": row.finish_reason,
        "prompt_token_ids": row.prompt_token_ids,
        "token_ids": row.token_ids,
        "ids_source": row.ids_source,
        "ids_match_usage": row.ids_match_usage,
        **tail,
    }


_COLUMNS: dict[str, pa.DataType] = {
    "key": pa.string(),
    "prompt_id": pa.string(),
    "sample": pa.int32(),
    "split": pa.string(),
    "turn": pa.int32(),
    "messages": SAMPLE_SCHEMA.field("messages").type,
    "tools": pa.string(),
    "answers": pa.int32(),
    "reasoning": pa.string(),
    "content": pa.string(),
    "tool_calls": pa.string(),
    "outcome": pa.string(),
    "finish_reason": pa.string(),
    "prompt_token_ids": pa.list_(pa.int32()),
    "token_ids": pa.list_(pa.int32()),
    "ids_source": pa.string(),
    "ids_match_usage": pa.bool_(),
    "drawn": pa.string(),
    "source": pa.string(),
    "model": pa.string(),
}
_ONLY_OF: dict[Turns, set[str]] = {
    "rows": {
        "turn", "reasoning", "content", "tool_calls", "prompt_token_ids", "token_ids", "ids_source", "ids_match_usage"
    },
    "conversations": {"answers"},
}  # fmt: skip


def schema_of(turns: Turns) -> pa.Schema:
    """The columns of a line."""
    other = _ONLY_OF["rows" if turns == "conversations" else "conversations"]
    return pa.schema([(name, kind) for name, kind in _COLUMNS.items() if name not in other])


def columns_of(line: JSON) -> JSON:
    """A line as Arrow takes it: columns have one type, so open-ended JSON is text (docs/samples.md)."""
    texts = {
        name: json.dumps(line[name], ensure_ascii=False)
        for name in ("tools", "tool_calls", "drawn")
        if line.get(name) is not None
    }
    return line | texts | {"messages": [message_row(message) for message in line["messages"]]}
