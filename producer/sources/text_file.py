"""A file of text, plain or compressed, whose rows a reader of its kind yields: JSON Lines, a JSON array, CSV."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from draftfleet.errors import DataError
from producer.shapes import Malformed, Row
from producer.sources.file_facts import content_of, facts_of, is_still
from producer.sources.source import Line

Read = Callable[[IO[bytes]], Iterator[tuple[int, Row | Malformed]]]
"""From a stream to numbered rows. Nothing is read ahead of what the buffer holds: the file may be a pipe."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_FIRST_BYTES = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PROGRESS_ROWS = 64
"""Rows between looks at the position in the file: a system call each, which would cost a fifth of the time."""


class TextFile:
    """A Source. `suffix` is that of its kind, without a compression's."""

    def __init__(self, path: Path, suffix: str, read: Read, *, hashed: bool = True) -> None:
        self.name = str(path)
        self.size = path.stat().st_size if path.is_file() else None
        self.position = 0
        self.columns: list[str] | None = None
        self.provenance: dict[str, Any] = {"kind": suffix.removeprefix("."), **facts_of(path, hashed=hashed)}
        self.digest = content_of(self.provenance)
        self._path = path
        self._suffix = suffix
        self._read = read

    def is_unchanged(self) -> bool:
        return is_still(self._path, self.provenance)

    def lines(self, columns: set[str]) -> Iterator[Line]:
        number, num_rows = 0, 0
        try:
            with self._path.open("rb") as raw:
                for number, row in self._read(self._decompressed(raw)):
                    if self.size is not None and num_rows % PROGRESS_ROWS == 0:
                        self.position = raw.tell()
                    num_rows += 1
                    yield Line(number, row)
            self.position = self.size or 0
        except (EOFError, zlib.error, OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self.name} cannot be read after line {number}: {error}. What came before it is queued; "
                "put a whole file in its place and produce again: only what is new is added."
            ) from error

    def _decompressed(self, raw: BufferedReader) -> IO[bytes]:
        first = raw.peek(4)[:4]
        found = next((name for start, name in _FIRST_BYTES.items() if first.startswith(start)), "")
        named = COMPRESSIONS.get(self._path.suffix, "")
        if found != named and first:
            wanted = next((suffix for suffix, name in COMPRESSIONS.items() if name == found), "")
            raise DataError(
                f"{self.name} is {found or f'not {named}'} by its first bytes: give it a name that ends in "
                f"{self._suffix}{wanted}."
            )
        if found == "gzip":
            return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
        if found == "zstd":
            return io.BufferedReader(cast(Any, pa.CompressedInputStream(raw, "zstd")))
        return raw
