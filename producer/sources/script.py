"""Rows that a script hands over, one by one: any iterable, read as its prompts are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

from producer.shapes import Malformed, Row, kind
from producer.sources.source import Line


class Script:
    """Items are what a line of a file may be: a row, the messages of a conversation, or the text of a prompt."""

    digest: str | None = None
    columns: list[str] | None = None

    def __init__(self, items: Iterable[object], name: str) -> None:
        self.name = name
        self.size = len(items) if isinstance(items, Sized) else None
        self.position = 0
        self.provenance: dict[str, Any] = {"kind": "script", "name": name}
        self._items = items

    def is_unchanged(self) -> bool:
        return False

    def lines(self, columns: set[str]) -> Iterator[Line]:
        for number, item in enumerate(self._items, 1):
            self.position = number
            yield Line(number, _row(item))


def _row(item: object) -> Row | Malformed:
    if isinstance(item, Mapping):
        return cast(Row, item)
    if isinstance(item, list):
        return {"messages": cast(object, item)}
    if isinstance(item, str):
        return {"prompt": item}
    return Malformed(f"{kind(item)}, neither a row nor a list of messages nor a text")
