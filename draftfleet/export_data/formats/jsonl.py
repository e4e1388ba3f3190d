"""JSON Lines, plain or compressed with zstandard: `data/train-00000-of-00001.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from draftfleet.export_data.formats import Format
from draftfleet.export_data.formats.files import Files
from draftfleet.export_data.units import Unit, Wanted, line_of
from draftfleet.names import Split

ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class JsonLines:
    def __init__(self, folder: Path, split: Split, wanted: Wanted, *, compression: str | None, suffix: str) -> None:
        self._files = Files(folder / "data", split, suffix)
        self._wanted = wanted
        self._compression = compression
        self._raw: Any = None
        self._sink: Any = None

    def write(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if self._sink is None:
                self._raw = pa.OSFile(str(self._files.next()), "wb")
                self._sink = self._raw
                if self._compression is not None:
                    self._sink = pa.CompressedOutputStream(self._raw, self._compression)
            self._sink.write((ENCODE(line_of(unit, self._wanted)) + "\n").encode())
            if self._raw.tell() >= self._wanted.file_mb * 1_000_000:
                self._end_file()

    def close(self) -> None:
        self._end_file()
        self._files.finish()

    def _end_file(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._raw.close()
            self._sink = None


PLAIN = Format(open=partial(JsonLines, compression=None, suffix=".jsonl"), files="data/{split}-*.jsonl")
ZSTD = Format(open=partial(JsonLines, compression="zstd", suffix=".jsonl.zst"), files="data/{split}-*.jsonl.zst")
