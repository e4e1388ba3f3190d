"""A Parquet file, some rows at a time and only the columns that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from draftfleet.errors import DataError
from producer.shapes import MEDIA_COLUMNS, Malformed, Row
from producer.sources.file_facts import content_of, facts_of, is_still
from producer.sources.source import Line

BATCH_ROWS = 1024
MEDIA_BATCH_ROWS = 16
"""Rows at a time where images stand beside the texts: they are megabytes each, and only looked at to be refused."""


class Parquet:
    """A Source."""

    def __init__(self, path: Path, *, hashed: bool = True) -> None:
        self.name = str(path)
        self.position = 0
        try:
            with pq.ParquetFile(path) as file:
                self._num_rows = file.metadata.num_rows
                self.columns: list[str] | None = list(file.schema_arrow.names)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a Parquet file: {error}.") from error
        self.size: int | None = path.stat().st_size
        self.provenance: dict[str, Any] = {
            "kind": "parquet",
            "rows": self._num_rows,
            **facts_of(path, hashed=hashed),
        }
        self.digest = content_of(self.provenance)
        self._path = path

    def is_unchanged(self) -> bool:
        return is_still(self._path, self.provenance)

    def lines(self, columns: set[str]) -> Iterator[Line]:
        present = [name for name in self.columns or [] if name in columns]
        at_a_time = MEDIA_BATCH_ROWS if MEDIA_COLUMNS.keys() & set(present) else BATCH_ROWS
        number = 0
        try:
            with pq.ParquetFile(self._path) as file:
                for batch in file.iter_batches(at_a_time, columns=present):
                    for row in _rows(batch):
                        number += 1
                        yield Line(number, row)
                    self.position = (self.size or 0) * number // self._num_rows
            self.position = self.size or 0
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.name} cannot be read after row {number}: {error}") from error


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
