"""What every source of rows is: a data set to be read once, as a stream, never whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from producer.shapes import Malformed, Row


class Line(NamedTuple):
    """One line or row, numbered from 1 as an editor would, of a file where a source has several."""

    number: int
    row: Row | Malformed
    file: str = ""


class Source(Protocol):
    """A data set to be read once. `size`, None if unknown, and `position` are bytes of files, rows of the hub."""

    name: str
    size: int | None
    columns: list[str] | None
    """None where they are not known before reading."""
    provenance: dict[str, Any]
    """What it is and where, with the hash of a file."""
    digest: str | None
    """Equal where the content is; None where nothing tells."""

    @property
    def position(self) -> int: ...

    def is_unchanged(self) -> bool:
        """Whether it still is what `digest` says: a file, not written to since."""
        ...

    def lines(self, columns: set[str]) -> Iterator[Line]:
        """Every line that is not blank. Other columns than these need not be read. Raises DataError."""
        ...


def digest_of(parts: Sequence[str | None]) -> str | None:
    """Of several contents in this order; None where one of them is unknown."""
    if None in parts:
        return None
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
