"""Several sources as one: the files of a folder or a pattern, one after the other; the data sets of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from producer.sources.file_facts import HASHED_BYTES
from producer.sources.source import Line, Source, digest_of


class Files:
    """A Source: files one after the other, each opened when its turn comes."""

    def __init__(self, name: str, paths: Sequence[Path], open_file: Callable[..., Source]) -> None:
        hashed = sum(path.stat().st_size for path in paths) <= HASHED_BYTES
        self._files = [open_file(path, hashed=hashed) for path in paths]
        self.name = name
        sizes = [file.size for file in self._files]
        self.size = sum(size or 0 for size in sizes) if None not in sizes else None
        self.columns = _shared_columns(self._files)
        self.provenance: dict[str, Any] = {"kind": "files", "files": [file.provenance for file in self._files]}
        self.digest = digest_of([file.digest for file in self._files])

    @property
    def position(self) -> int:
        return sum(file.position for file in self._files)

    def is_unchanged(self) -> bool:
        return all(file.is_unchanged() for file in self._files)

    def lines(self, columns: set[str]) -> Iterator[Line]:
        for file in self._files:
            yield from (Line(line.number, line.row, file.name) for line in file.lines(columns))


class Mixture:
    """Sources that are read by turns. Not read itself: each of `parts` is, with rules of its own."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = list(parts)
        self.name = ", ".join(part.name for part in self.parts)
        sizes, in_rows = [part.size for part in self.parts], {"rows" in part.provenance for part in self.parts}
        self.size = sum(size or 0 for size in sizes) if None not in sizes and len(in_rows) == 1 else None
        self.columns: list[str] | None = None
        self.provenance: dict[str, Any] = {"kind": "mixture", "sources": [part.provenance for part in self.parts]}
        self.digest = digest_of([part.digest for part in self.parts])

    @property
    def position(self) -> int:
        return sum(part.position for part in self.parts)

    def is_unchanged(self) -> bool:
        return all(part.is_unchanged() for part in self.parts)

    def lines(self, columns: set[str]) -> Iterator[Line]:
        for part in self.parts:
            yield from part.lines(columns)


def _shared_columns(files: Sequence[Source]) -> list[str] | None:
    """Every column that one of the files has; None where one does not tell before it is read."""
    known = [file.columns for file in files]
    if None in known:
        return None
    return list(dict.fromkeys(name for columns in known for name in columns or ()))
