"""A few large Parquet files: `data/train-00000-of-00003.parquet`, with a checksum in every page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftfleet.export_data.formats import Format
from draftfleet.export_data.formats.files import Files
from draftfleet.export_data.units import Unit, Wanted, columns_of, line_of, schema_of
from draftfleet.names import Split

GROUP_BYTES = 64_000_000
"""Of a row group, uncompressed."""


class Parquet:
    def __init__(self, folder: Path, split: Split, wanted: Wanted) -> None:
        self._files = Files(folder / "data", split, ".parquet")
        self._wanted = wanted
        self._schema = schema_of(wanted.turns)
        self._file_bytes = wanted.file_mb * 1_000_000
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._sink: Any = None
        self._writer: Any = None

    def write(self, units: Sequence[Unit]) -> None:
        lines = [columns_of(line_of(unit, self._wanted)) for unit in units]
        table = pa.Table.from_pylist(lines, self._schema)
        self._waiting.append(table)
        self._waiting_bytes += table.nbytes
        if self._waiting_bytes >= min(GROUP_BYTES, self._file_bytes):
            self._write_group()

    def close(self) -> None:
        self._write_group()
        self._end_file()
        self._files.finish()

    def _write_group(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            self._sink = pa.OSFile(str(self._files.next()), "wb")
            self._writer = pq.ParquetWriter(self._sink, self._schema, compression="zstd", write_page_checksum=True)
        self._writer.write_table(pa.concat_tables(self._waiting).combine_chunks())
        self._waiting, self._waiting_bytes = [], 0
        if self._sink.tell() >= self._file_bytes:
            self._end_file()

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None


FORMAT = Format(open=Parquet, files="data/{split}-*.parquet")
