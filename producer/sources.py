"""Where rows come from: JSON Lines, plain or gzipped, Parquet, or a `datasets` data set. Read as a stream, never whole.

A line that cannot be read is yielded as Malformed and the rest goes on; a source that cannot be read is a DataError.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from draftfleet import settings
from draftfleet.errors import DataError
from producer.prompts import Malformed, Row, kind

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
GZIP_MAGIC = b"\x1f\x8b"
HASHED_BYTES = 1 << 33
"""Files up to this size get a SHA-256, and are recognised by it: 8 GiB take about 7 s, and minutes to be read."""
PARQUET_ROWS = 1024
PROGRESS_LINES = 64
"""Lines between looks at the position in the file: a system call each, which would cost a fifth of the time."""


class Line(NamedTuple):
    """One line or row, numbered from 1 as an editor would."""

    number: int
    row: Row | Malformed


class Source(Protocol):
    """A data set to be read once. `size`, None if unknown, and `position` have the same unit: bytes or rows."""

    name: str
    size: int | None
    position: int
    columns: list[str] | None
    """None where they are not known before reading."""
    provenance: dict[str, Any]
    """What it is and where, with the hash of a file."""

    def is_unchanged(self) -> bool:
        """Whether it still is what `provenance` says: a file, not written to since."""
        ...

    def lines(self, columns: set[str]) -> Iterator[Line]:
        """Every line that is not blank. Other columns than these need not be read."""
        ...


def open_source(knobs: settings.Producer) -> Source:
    """Raises DataError, saying what is there instead, if it is no file and no data set."""
    assert isinstance(knobs.data, str)
    path = Path(knobs.data).expanduser()
    if path.is_dir():
        return DataSet(str(path.absolute()), knobs.split or "train")
    if not path.exists():
        if _looks_like_path(knobs.data):
            raise DataError(_missing(path))
        return DataSet(knobs.data, knobs.split or "train")
    if path.name.endswith(".parquet"):
        return Parquet(path)
    if path.name.endswith(SUFFIXES):
        return JsonLines(path)
    raise DataError(
        f"producer.data = {knobs.data}: not a kind of file that is read; known are {', '.join(SUFFIXES)}, "
        "a folder, or the name of a `datasets` data set."
    )


class JsonLines:
    """One JSON object a line. The file may be a pipe: nothing is read ahead of what the buffer holds."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.size = path.stat().st_size if path.is_file() else None
        self.position = 0
        self.columns: list[str] | None = None
        self.provenance = {"kind": "jsonl", **_file_facts(path)}
        self._path = path

    def is_unchanged(self) -> bool:
        return _is_still(self._path, self.provenance)

    def lines(self, columns: set[str]) -> Iterator[Line]:
        number = 0
        try:
            with self._path.open("rb") as raw:
                for number, line in enumerate(self._decompressed(raw), 1):
                    if self.size is not None and number % PROGRESS_LINES == 1:
                        self.position = raw.tell()
                    if line := line.rstrip():
                        yield Line(number, _parse(line, first=number == 1))
            self.position = self.size or 0
        except (EOFError, zlib.error, OSError) as error:
            raise DataError(
                f"{self.name} cannot be read after line {number}: {error}. What came before it is queued; "
                "put a whole file in its place and produce again: only what is new is added."
            ) from error

    def _decompressed(self, raw: BufferedReader) -> IO[bytes]:
        compressed = raw.peek(2)[:2] == GZIP_MAGIC
        if compressed == self.name.endswith(".gz"):
            return cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if compressed else raw
        if not raw.peek(1):
            return raw
        was, wanted = ("gzip", ".jsonl.gz") if compressed else ("not gzip", ".jsonl")
        raise DataError(f"{self.name} is {was} by its first bytes: give it a name that ends in {wanted}.")


class Parquet:
    """A Parquet file, some rows at a time."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.position = 0
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a Parquet file: {error}. Known are {', '.join(SUFFIXES)}.") from error
        self.size: int | None = self._file.metadata.num_rows
        self.columns: list[str] | None = list(self._file.schema_arrow.names)
        self.provenance = {"kind": "parquet", "rows": self.size, **_file_facts(path)}
        self._path = path

    def is_unchanged(self) -> bool:
        return _is_still(self._path, self.provenance)

    def lines(self, columns: set[str]) -> Iterator[Line]:
        present = [name for name in self.columns or [] if name in columns]
        try:
            for batch in self._file.iter_batches(PARQUET_ROWS, columns=present):
                for row in _rows(batch):
                    self.position += 1
                    yield Line(self.position, row)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.name} cannot be read after row {self.position}: {error}") from error


class DataSet:
    """A data set of the `datasets` library, as a stream: a name on the hub, `name:config`, or a folder."""

    def __init__(self, name: str, split: str) -> None:
        from datasets import load_dataset  # noqa: PLC0415  # takes seconds, so only who needs it pays
        from datasets.exceptions import DatasetsError  # noqa: PLC0415

        self.name = name
        self.position = 0
        self._faults = (
            DatasetsError,
            pa.ArrowException,
            OSError,
            ValueError,
            RuntimeError,
            KeyError,
        )
        repository, _, config = (name, "", "") if Path(name).is_dir() else name.partition(":")
        try:
            self._stream = load_dataset(repository, config or None, split=split, streaming=True)
        except self._faults as error:
            near = _near(Path(name))
            raise DataError(
                f"producer.data = {name}, split {split}: neither a file{near} nor a data set that could be opened: "
                f"{error}. Name a {', '.join(SUFFIXES)} file, a folder, or NAME or NAME:CONFIG of a data set; "
                "producer.split names its split."
            ) from error
        info = self._stream.info
        known = (info.splits or {}).get(split)
        self.size = known.num_examples if known is not None and known.num_examples else None
        self.columns = self._stream.column_names
        self.provenance = {"kind": "datasets", "name": name, "split": split, "version": str(info.version)}

    def is_unchanged(self) -> bool:
        return False

    def lines(self, columns: set[str]) -> Iterator[Line]:
        present = [name for name in self.columns or [] if name in columns]
        stream = self._stream.select_columns(present) if present else self._stream
        try:
            for row in stream:
                self.position += 1
                yield Line(self.position, cast(Row, row))
        except self._faults as error:
            raise DataError(
                f"data set {self.name} cannot be read after row {self.position}: {error}. What came before it is "
                "queued; produce again once it can be read: only what is new is added."
            ) from error


def _parse(line: bytes, *, first: bool) -> Row | Malformed:
    try:
        value: object = _DECODER.decode(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return Malformed(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}")
    except json.JSONDecodeError as error:
        return Malformed(f"not JSON: {error.msg} at position {error.colno}")
    except (ValueError, RecursionError) as error:
        return Malformed(f"not JSON: {error}")
    return cast(Row, value) if isinstance(value, dict) else Malformed(f"{kind(value)}, not an object")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


# Python would read NaN and write it again, and no server would take it.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _rows(batch: pa.RecordBatch) -> list[Row | Malformed]:
    """One bad text must not cost the other rows of its batch."""
    try:
        return cast(list[Row | Malformed], batch.to_pylist())
    except UnicodeDecodeError:
        return [_row(batch.slice(number, 1)) for number in range(batch.num_rows)]


def _row(batch: pa.RecordBatch) -> Row | Malformed:
    try:
        return cast(Row, batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        return Malformed(f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}")


def _file_facts(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": str(path.absolute())}
    if not path.is_file():
        return facts
    stat = path.stat()
    facts |= {"size_bytes": stat.st_size, "modified_at": stat.st_mtime, "sha256": None}
    if stat.st_size <= HASHED_BYTES:
        try:
            with path.open("rb") as file:
                facts["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"producer.data = {path} cannot be read: {error.strerror}.") from error
    return facts


def _is_still(path: Path, facts: dict[str, Any]) -> bool:
    if not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, stat.st_mtime) == (facts["size_bytes"], facts["modified_at"])


def _looks_like_path(data: str) -> bool:
    return data.endswith((*SUFFIXES, ".json", ".gz")) or data.startswith(("/", ".", "~")) or data.count("/") > 1


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"producer.data = {path} is not there, nor is its folder {folder.absolute()}. Correct the path."
    return f"producer.data = {path} is not there{_near(path)}. Correct the path."


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [entry.name for entry in path.parent.iterdir() if entry.name.endswith(SUFFIXES)]
    stems = {name.partition(".")[0]: name for name in names}
    alike = difflib.get_close_matches(path.name.partition(".")[0], stems, n=3)
    near = [stems[stem] for stem in alike] or sorted(names)[:3]
    return f" (in {path.parent.absolute()} there are {', '.join(near)})" if near else ""
