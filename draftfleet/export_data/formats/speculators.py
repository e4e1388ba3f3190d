"""speculators' prepared data: a folder per split, as its `speculators/train/data.py: ArrowDataset` (0.9.0) loads it.

What `speculators prepare-data` makes of conversations, with the exact ids instead: `input_ids`, `loss_mask`, `seq_len`,
handed out as torch tensors of int64. `key` says which row of the run a line is; it is not read. Line I has its hidden
states in `hidden_states/hs_I.safetensors` once speculators made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from draftfleet.export_data.formats import Format
from draftfleet.export_data.formats.arrow import ArrowFolder
from draftfleet.export_data.units import Unit, Wanted, ids_and_mask
from draftfleet.names import Split

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("seq_len", pa.int64()),
        ("key", pa.string()),
    ]
)


class Speculators:
    def __init__(self, folder: Path, split: Split, wanted: Wanted) -> None:
        self._folder = ArrowFolder(folder / split, SCHEMA, wanted.file_mb * 1_000_000, as_format="torch")

    def write(self, units: Sequence[Unit]) -> None:
        self._folder.write_lines([_line(unit) for unit in units])

    def close(self) -> None:
        self._folder.close()


def _line(unit: Unit) -> dict[str, Any]:
    ids, mask = ids_and_mask(unit.last)
    return {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids), "key": unit.key}


FORMAT = Format(open=Speculators, files="{split}/data-*.arrow", needs_ids=("rows",), turns=("rows",))
