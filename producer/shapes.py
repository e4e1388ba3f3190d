"""What a row is, and the two ways in which it holds no prompt."""

from __future__ import annotations

from collections.abc import Mapping

Row = Mapping[str, object]

MEDIA_COLUMNS = {
    "image": "image",
    "images": "image",
    "video": "video",
    "videos": "video",
    "audio": "audio",
    "audios": "audio",
}
"""Columns with what cannot be asked, by what it is. A row may hold none of it there."""

_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


class Malformed(Exception):
    """A line that holds no conversation in an accepted shape. Counted and named by line; the rest goes on."""


class Rejected(Exception):
    """A conversation that cannot be asked. `reason` is what it is counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class Filtered(Rejected):
    """One that is not wanted: no fault of the line, which is counted and not named."""


def kind(value: object) -> str:
    """As JSON names it."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
