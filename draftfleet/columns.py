"""A sample as a row of its shard, and back: the Arrow schema, with open-ended JSON as text."""

from __future__ import annotations

import json
from typing import Any, cast

import pyarrow as pa

from draftfleet.records import Sample, Turn, compact, fields_of

JSON_TEXTS = ("tools", "tool_calls", "drawn")
"""Columns that hold JSON as text: Arrow columns have one type."""


MESSAGE_TEXTS = ("role", "content", "reasoning_content", "tool_call_id", "name")
"""Fields of a message that are columns of their own when they hold text; all else lies in `extra`, as JSON."""


def message_row(message: dict[str, Any]) -> dict[str, Any]:
    texts = {name: message[name] for name in MESSAGE_TEXTS if isinstance(message.get(name), str)}
    rest = {name: value for name, value in message.items() if name not in texts and name != "tool_calls"}
    return texts | {"tool_calls": _text(message.get("tool_calls")), "extra": _text(rest or None)}


def message_from_row(row: dict[str, Any]) -> dict[str, Any]:
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
        pa.field("sample", pa.int32()),
        pa.field("drawn", pa.string()),
        pa.field(
            "turns",
            pa.list_(
                pa.struct(
                    [
                        pa.field("message", pa.int32()),
                        pa.field("finish_reason", pa.string()),
                        pa.field("reasoning_source", pa.string()),
                        pa.field("prompt_token_ids", pa.list_(pa.int32())),
                        pa.field("token_ids", pa.list_(pa.int32())),
                        pa.field("ids_source", pa.string()),
                        pa.field("prompt_tokens", pa.int32()),
                        pa.field("completion_tokens", pa.int32()),
                        pa.field("server", pa.string()),
                        pa.field("seconds", pa.float64()),
                    ]
                )
            ),
        ),
        pa.field("ended", pa.string()),
        pa.field("source", pa.string()),
    ]
)
"""The columns of a sample shard, in order."""


def _text(value: object) -> str | None:
    return None if value is None else compact(value)


def row_of(sample: Sample) -> dict[str, Any]:
    """The row of a shard."""
    row = fields_of(sample)
    row["messages"] = [message_row(message) for message in sample.messages]
    for key in JSON_TEXTS:
        row[key] = _text(getattr(sample, key))
    row["turns"] = [fields_of(turn) for turn in sample.turns]
    row["ids_match_usage"] = sample.ids_match_usage
    return row


def sample_of(row: dict[str, Any]) -> Sample:
    """Raises TypeError, KeyError or ValueError where the row is none of a sample."""
    row = {key: value for key, value in row.items() if key != "ids_match_usage"}
    row["messages"] = [message_from_row(message) for message in row["messages"]]
    for key in JSON_TEXTS:
        row[key] = json.loads(row[key]) if row.get(key) is not None else None
    row["turns"] = [Turn(**turn) for turn in row.get("turns") or ()]
    return Sample(**row)
