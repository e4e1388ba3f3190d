"""A folder that `datasets.load_from_disk` reads: a folder of Arrow files per split, and the list of the splits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from draftfleet.export_data.formats import Format
from draftfleet.export_data.formats.files import Files
from draftfleet.export_data.units import Unit, Wanted, columns_of, line_of, schema_of
from draftfleet.names import Split


class ArrowFolder:
    """What `Dataset.save_to_disk` writes, line by line. `as_format` is the form in which rows are handed out."""

    def __init__(self, folder: Path, schema: pa.Schema, file_bytes: int, *, as_format: str | None = None) -> None:
        from datasets import DatasetInfo, Features  # noqa: PLC0415  two seconds of imports

        features = Features.from_arrow_schema(schema)
        self._info = DatasetInfo(features=features)
        self._schema = features.arrow_schema
        self._folder = folder
        self._file_bytes = file_bytes
        self._as_format = as_format
        self._files = Files(folder, "data", ".arrow")
        self._sink: Any = None
        self._writer: Any = None

    def write_lines(self, lines: list[dict[str, Any]]) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._files.next()), "wb")
            self._writer = pa.ipc.new_stream(self._sink, self._schema)
        self._writer.write_table(pa.Table.from_pylist(lines, self._schema))
        if self._sink.tell() >= self._file_bytes:
            self._end_file()

    def close(self) -> None:
        self._end_file()
        names = [path.name for path in self._files.finish()]
        state = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": self._fingerprint(names),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": self._as_format,
            "_output_all_columns": False,
            "_split": None,
        }
        (self._folder / "state.json").write_text(json.dumps(state, indent=2))
        self._info.write_to_directory(str(self._folder), pretty_print=True)

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None

    def _fingerprint(self, names: Sequence[str]) -> str:
        """`datasets` names what it caches by it: other bytes, another fingerprint."""
        digest = hashlib.sha256()
        for name in names:
            with (self._folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16]


class Arrow:
    def __init__(self, folder: Path, split: Split, wanted: Wanted) -> None:
        self._wanted = wanted
        self._folder = ArrowFolder(folder / split, schema_of(wanted.turns), wanted.file_mb * 1_000_000)

    def write(self, units: Sequence[Unit]) -> None:
        self._folder.write_lines([columns_of(line_of(unit, self._wanted)) for unit in units])

    def close(self) -> None:
        self._folder.close()


def list_splits(folder: Path, splits: Sequence[Split]) -> None:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


FORMAT = Format(open=Arrow, files="{split}/data-*.arrow", finish=list_splits)
