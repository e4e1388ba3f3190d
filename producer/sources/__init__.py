"""Where rows come from: files of several kinds, folders and patterns of them, the hub. One file per kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from draftfleet import settings
from draftfleet.errors import DataError
from producer import presets
from producer.chosen import chosen
from producer.shapes import Malformed, Row
from producer.sources import hub, places
from producer.sources.csv_rows import read_csv
from producer.sources.json_array import read_json
from producer.sources.json_lines import read_json_lines
from producer.sources.parquet import Parquet
from producer.sources.several import Files, Mixture
from producer.sources.source import Line, Source
from producer.sources.text_file import TextFile

__all__ = ["Line", "Mixture", "Source", "open_source"]

READERS: dict[str, Callable[[IO[bytes]], Iterator[tuple[int, Row | Malformed]]]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
}
"""From the suffix of a text file to what reads it."""


def open_source(knobs: settings.Producer) -> Source:
    """What the settings name: one data set, or a Mixture of several. Raises DataError, saying what is there instead."""
    opened = [_open(one) for one in chosen(knobs)]
    return Mixture(opened) if knobs.sources else opened[0]


def _open(source: settings.Source) -> Source:
    """With the licence that a preset knows, for the card of what is made of it."""
    opened = _found(source)
    if source.preset:
        preset = presets.find(source.preset)
        opened.provenance |= {"preset": preset.name, "licence": preset.licence}
    return opened


def _found(source: settings.Source) -> Source:
    named = source.data if isinstance(source.data, list) else [source.data]
    if len(named) == 1 and places.is_saved(folder := Path(named[0]).expanduser()):
        return hub.open_saved(folder, source.split)
    paths: list[Path] = []
    for data in named:
        found = places.files_of(data, source.split)
        if found is None and len(named) > 1:
            raise DataError(
                f"producer.data names {len(named)} places, and {data} is no file{places.near(Path(data))}. Several "
                "data sets of the hub are several [[producer.sources]]."
            )
        if found is None:
            return hub.open_hub(data, source.split or "train", source.subset, source.revision, places.near(Path(data)))
        paths += found
    return _open_file(paths[0]) if len(paths) == 1 else Files(_name_of(named), paths, _open_file)


def _open_file(path: Path, *, hashed: bool = True) -> Source:
    suffix = places.suffix_of(path)
    if suffix == ".parquet":
        return Parquet(path, hashed=hashed)
    kind = suffix.removesuffix(".gz").removesuffix(".zst")
    return TextFile(path, kind, READERS[kind], hashed=hashed)


def _name_of(named: Sequence[str]) -> str:
    return named[0] if len(named) == 1 else f"{named[0]} and {len(named) - 1} more"
