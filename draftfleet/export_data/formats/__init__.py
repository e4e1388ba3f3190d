"""The forms in which a run is written, and the table of their names.

Another form is a module with a FORMAT, a line here, a test that reads it with its own reader, and a row in
docs/export-data.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from draftfleet.errors import SettingsError
from draftfleet.export_data.units import Turns, Unit, Wanted
from draftfleet.names import Split

FORMATS = {
    "jsonl": "jsonl:PLAIN",
    "jsonl.zst": "jsonl:ZSTD",
    "parquet": "parquet:FORMAT",
    "arrow": "arrow:FORMAT",
    "specforge": "specforge:FORMAT",
    "speculators": "speculators:FORMAT",
}
"""From name to module and constant, imported on use."""


class Writer(Protocol):
    """Writes the lines of one split."""

    def write(self, units: Sequence[Unit]) -> None: ...

    def close(self) -> None:
        """Finish the last file."""
        ...


def _nothing(folder: Path, splits: Sequence[Split]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`open` gets the folder of the export, the split and what is wanted. `files` is a glob, for the card.

    `needs_ids`: with these lines, rows without ids that match usage are left out. `finish` is called once, with the
    splits that have lines.
    """

    open: Callable[[Path, Split, Wanted], Writer]
    files: str
    needs_ids: tuple[Turns, ...] = ()
    turns: tuple[Turns, ...] = ("rows", "conversations")
    finish: Callable[[Path, Sequence[Split]], None] = _nothing


def format_of(wanted: Wanted) -> Format:
    """Raises SettingsError on an unknown name, or on one that has no such lines."""
    if wanted.format not in FORMATS:
        raise SettingsError(f"--format {wanted.format} is not known: use one of {', '.join(FORMATS)}.")
    module, _, name = FORMATS[wanted.format].partition(":")
    found: Format = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    if wanted.turns not in found.turns:
        raise SettingsError(
            f"--format {wanted.format} has no lines of {wanted.turns}: use --turns {' or '.join(found.turns)}."
        )
    return found
