"""The files of an import and their lines: JSON Lines, plain or compressed, and Parquet. Read as a stream."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from draftfleet.errors import DataError
from producer.shapes import Malformed, Row, kind

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
PARQUET_ROWS = 256
PROGRESS_LINES = 64
FAULTS = (EOFError, zlib.error, OSError, pa.ArrowException)

Step = Callable[[int], object]
"""Told how many bytes of the file were read since it was told last."""


class Line(NamedTuple):
    """One line or row, numbered from 1 as an editor would."""

    number: int
    row: Row | Malformed


@dataclass(frozen=True, slots=True)
class File:
    """`name` is what samples say they came from: the file's, with the folders below the one that was named."""

    path: Path
    name: str
    size: int

    def facts(self) -> dict[str, Any]:
        with self.path.open("rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
        return {"name": self.name, "path": str(self.path.absolute()), "size_bytes": self.size, "sha256": digest}


def find(paths: Sequence[str]) -> list[File]:
    """These files, and all in these folders, each once. Raises DataError where there is none."""
    if not paths:
        raise DataError(f"no file is named: name files ({', '.join(SUFFIXES)}) or folders of them.")
    found: dict[Path, File] = {}
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists():
            raise DataError(f"{given} is not there: name a file ({', '.join(SUFFIXES)}) or a folder of them.")
        below = sorted(_below(path)) if path.is_dir() else [path]
        if not below:
            raise DataError(f"{given} holds no file that is read: {', '.join(SUFFIXES)}.")
        for one in below:
            if not one.is_file() or not one.name.endswith(SUFFIXES):
                raise DataError(f"{one} is not a kind of file that is read: {', '.join(SUFFIXES)}.")
            name = str(one.relative_to(path)) if path.is_dir() else one.name
            found.setdefault(one.resolve(), File(one, name, one.stat().st_size))
    return list(found.values())


def lines(file: File, step: Step) -> Iterator[Line]:
    """Every line that is not blank. Where a file breaks off, that is one malformed line; what came before is good."""
    reading = _parquet(file, step) if file.name.endswith(".parquet") else _json_lines(file, step)
    number = 0
    try:
        for line in reading:
            number = line.number
            yield line
    except FAULTS as error:
        yield Line(number + 1, Malformed(f"the file cannot be read from here on: {error}"))


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and path.name.endswith(SUFFIXES) and not hidden:
            yield path


def _json_lines(file: File, step: Step) -> Iterator[Line]:
    with file.path.open("rb") as raw:
        position = 0
        for number, line in enumerate(_decompressed(raw), 1):
            if number % PROGRESS_LINES == 0:
                before, position = position, raw.tell()
                step(position - before)
            if line := line.strip():
                yield Line(number, _parsed(line))
        step(file.size - position)


def _decompressed(raw: io.BufferedReader) -> IO[bytes]:
    """By its first bytes, whatever its name says."""
    start = raw.peek(4)[:4]
    if start.startswith(GZIP_MAGIC):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if start == ZSTD_MAGIC:
        return cast(IO[bytes], io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")))
    return raw


def _parsed(line: bytes) -> Row | Malformed:
    try:
        value: object = _DECODER.decode(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Malformed(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}")
    except (ValueError, RecursionError) as error:
        return Malformed(f"not JSON: {error}")
    return cast(Row, value) if isinstance(value, dict) else Malformed(f"{kind(value)}, not an object")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _parquet(file: File, step: Step) -> Iterator[Line]:
    try:
        table = pq.ParquetFile(file.path)
    except FAULTS as error:
        raise DataError(f"{file.path} is not a Parquet file: {error}.") from error
    number, total = 0, max(table.metadata.num_rows, 1)
    for batch in table.iter_batches(PARQUET_ROWS):
        for row in _rows(batch):
            number += 1
            yield Line(number, row)
        step(file.size * batch.num_rows // total)


def _rows(batch: pa.RecordBatch) -> list[Row | Malformed]:
    """One bad text must not cost the other rows of its batch."""
    try:
        return cast(list[Row | Malformed], batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [Malformed(f"not UTF-8: byte 0x{error.object[error.start]:02x}")]
        return [row for number in range(batch.num_rows) for row in _rows(batch.slice(number, 1))]
