"""Messages in one form, whatever form they came in: OpenAI's or ShareGPT's, tools as lists or as JSON text.

docs/data-sets.md shows every shape.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from draftfleet.records import Conversation
from producer.shapes import MEDIA_COLUMNS, Malformed, Rejected, Row, kind, short

JSON_COLUMNS = ("messages", "conversations", "conversation")
"""Columns in which a text is JSON, and no question."""

ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

_REASONING = ("reasoning_content", "reasoning", "thinking")
_MEDIA_PART = re.compile("image|video|audio|file")
_PLACE_OF_MEDIA = re.compile(r"<(image|video|audio)>")
_LINE_OF_MEDIA = re.compile(r"^<(image|video|audio)>\s*$", re.MULTILINE)
"""What stands for an image in the text of data sets with images; a line of its own also where there is no column."""


def conversation(value: object, column: str = "messages", *, every_turn: bool = False) -> Conversation:
    """The messages behind one value: a text is a user's turn, a list holds OpenAI or ShareGPT messages.

    A list of texts holds a user's turns without their answers: the first, or with `every_turn` all of them, each
    before the last with an empty answer that the target replaces.
    """
    if isinstance(value, str) and column in JSON_COLUMNS:
        value = parsed(value, column)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise Malformed(f"{column} is {kind(value)}, neither a text nor a list of messages")
    given = cast(list[object], value)
    if column not in JSON_COLUMNS and given and all(isinstance(one, str) for one in given):
        return _turns(cast(list[str], given), every_turn=every_turn)
    return [_message(one, number) for number, one in enumerate(given, 1)]


def tool_definitions(value: object) -> list[dict[str, Any]] | None:
    """A list of tools, a list with such a list in it, or JSON text of them. Nothing where there is none."""
    found = _objects(value, "tools")
    return [_as_function(tool) for tool in found] if found else None


def refuse_media(row: Row, messages: Conversation) -> None:
    """Raises Rejected where the row holds an image, a video or a sound beside its messages."""
    columns = MEDIA_COLUMNS.keys() & row.keys()
    for column in MEDIA_COLUMNS if columns else ():
        if row.get(column):
            raise Rejected(MEDIA_COLUMNS[column], f"{column} is not empty; only text can be asked")
    mark = _PLACE_OF_MEDIA if columns else _LINE_OF_MEDIA
    for number, message in enumerate(messages, 1):
        content = message["content"]
        if isinstance(content, str) and "<" in content and (found := mark.search(content)):
            raise Rejected(found.group(1), f"message {number} holds {found.group().strip()}; only text can be asked")


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return " ".join(str(part.get("text", "")) for part in content)


def parsed(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what} is a text that is not JSON: {error}") from None


def _turns(texts: list[str], *, every_turn: bool) -> Conversation:
    asked: Conversation = []
    for text in texts if every_turn else texts[:1]:
        asked += [{"role": "assistant", "content": ""}] if asked else []
        asked.append({"role": "user", "content": text})
    return asked


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
        raise Rejected("unknown role", f"message {number} is by {short(role)}; known are {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": known, "content": _content(given.get("content", given.get("value")), number)}
    if reasoning := next((given[key] for key in _REASONING if given.get(key)), None):
        message["reasoning_content"] = _string(reasoning, f"the reasoning of message {number}")
    if calls := _objects(given.get("tool_calls"), f"tool_calls of message {number}"):
        message["tool_calls"] = [_call(_as_function(call)) for call in calls]
    for key in ("tool_call_id", "name"):
        if key in given:
            message[key] = _string(given[key], f"{key} of message {number}")
    return message


def refuse_missing_content(messages: Conversation) -> None:
    """Of an assistant's turn nothing is missing where it calls a tool, or where it ended inside its thought."""
    for number, message in enumerate(messages, 1):
        if message["content"] is not None:
            continue
        if message["role"] != "assistant" or not (message.get("tool_calls") or message.get("reasoning_content")):
            raise Malformed(f"message {number} ({message['role']}) has no content, and no value")


def _content(value: object, number: int) -> str | list[dict[str, Any]] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in cast(list[object], value)):
        raise Malformed(f"the content of message {number} is {kind(value)}, neither a text nor a list of objects")
    parts = cast(list[dict[str, Any]], without_nulls(cast(object, value)))
    for part in parts:
        named = str(part.get("type", "text"))
        if media := _MEDIA_PART.search(named):
            raise Rejected(media.group(), f"message {number} has a part of type {named}; only text can be asked")
    return parts


def _objects(value: object, what: str) -> list[dict[str, Any]]:
    """A list of objects, each an object or its JSON text, or the whole as JSON text. `[[]]` is as empty as `[]`."""
    if isinstance(value, str):
        value = parsed(value, what) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed(f"{what} is {kind(value)}, not a list of objects")
    found: list[dict[str, Any]] = []
    for one in cast(list[object], value):
        entry = parsed(one, what) if isinstance(one, str) else one
        if isinstance(entry, list):
            found += _objects(cast(object, entry), what)
        elif isinstance(entry, dict):
            found.append(cast(dict[str, Any], without_nulls(cast(object, entry))))
        elif entry is not None:
            raise Malformed(f"{what} holds {kind(entry)}, not objects alone")
    return found


def _as_function(given: dict[str, Any]) -> dict[str, Any]:
    """A tool, or a call of one, with its name under `function`, where servers look for it."""
    if "function" in given or "name" not in given:
        return given
    outer = {key: given[key] for key in ("id",) if key in given}
    return {**outer, "type": "function", "function": {key: entry for key, entry in given.items() if key not in outer}}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """With its arguments as text, which is what the API takes: data sets hold text, objects, or both by turns."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = cast(dict[str, Any], function).get("arguments")
    if arguments is None or isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def without_nulls(value: object) -> object:
    """Parquet gives every object every key of its column, null where it has none: null is the same as absent."""
    if isinstance(value, dict):
        entries = cast(dict[str, object], value).items()
        return {key: without_nulls(entry) for key, entry in entries if entry is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in cast(list[object], value)]
    return value


def _string(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{what} is {kind(value)}, not a text")
    return value
