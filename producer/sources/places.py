"""Which files a `producer.data` names: a file, a pattern, a folder, or several of them. None where it is no file."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from draftfleet.errors import DataError

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*(f"{suffix}{packed}" for suffix in TEXT_SUFFIXES for packed in ("", ".gz", ".zst")), ".parquet")
KNOWN = "JSON Lines (.jsonl), JSON (.json), CSV (.csv, .tsv), each also as .gz or .zst, and .parquet"

_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
"""As `datasets` finds splits in the names of files."""

_SAVED = ("dataset_dict.json", "state.json")


def suffix_of(path: Path) -> str:
    """The known one, the longest first; empty if there is none."""
    name = path.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")


def is_saved(path: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return any((path / name).is_file() for name in _SAVED)


def files_of(data: str, split: str | None) -> list[Path] | None:
    """In order. None where it looks like the name of a data set. Raises DataError with what is there instead."""
    path = Path(data).expanduser()
    if path.is_dir():
        return _of_folder(path, split)
    if path.exists():
        if not suffix_of(path):
            raise DataError(f"producer.data = {data}: not a kind of file that is read; known are {KNOWN}, or a folder.")
        return [path]
    if glob.has_magic(data):
        return _of_pattern(data)
    if _looks_like_path(data):
        raise DataError(_missing(path))
    return None


def near(path: Path) -> str:
    """Files in the same folder that may have been meant, in brackets."""
    if not path.parent.is_dir():
        return ""
    names = [entry.name for entry in path.parent.iterdir() if suffix_of(entry)]
    stems = {name.partition(".")[0]: name for name in names}
    alike = difflib.get_close_matches(path.name.partition(".")[0], stems, n=3)
    found = [stems[stem] for stem in alike] or sorted(names)[:3]
    return f" (in {path.parent.absolute()} there are {', '.join(found)})" if found else ""


def _of_pattern(data: str) -> list[Path]:
    names = sorted(glob.glob(os.path.expanduser(data), recursive=True))
    paths = [path for path in map(Path, names) if path.is_file()]
    if not paths:
        fixed = Path(os.path.expanduser(re.split(r"[*?\[]", data)[0]))
        folder = fixed if data[len(str(fixed)) : len(str(fixed)) + 1] == "/" or fixed.is_dir() else fixed.parent
        raise DataError(f"producer.data = {data}: no file is named so{_instead(folder)}. Correct the pattern.")
    if unknown := [path for path in paths if not suffix_of(path)]:
        raise DataError(
            f"producer.data = {data}: {unknown[0]} is not a kind of file that is read; known are {KNOWN}. Make the "
            "pattern narrower."
        )
    return paths


def _of_folder(folder: Path, split: str | None) -> list[Path]:
    paths = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and suffix_of(path) and not _hidden(path, folder)
    ]
    if not paths:
        raise DataError(f"producer.data = {folder}: the folder holds no file that is read; known are {KNOWN}.")
    splits = {path: _split(path.relative_to(folder)) for path in paths}
    found = set(splits.values()) - {None}
    if not found and split in (None, "train"):
        return paths
    wanted = split or "train"
    chosen = [path for path in paths if splits[path] == _SPLIT_WORDS.get(wanted, wanted)]
    if not chosen:
        there = ", ".join(sorted(str(one) for one in found)) or "none, by the names of its files"
        raise DataError(f"producer.data = {folder} has no split {wanted}; there are {there}. Set producer.split.")
    return chosen


def _hidden(path: Path, folder: Path) -> bool:
    """Not data: `.cache`, and what `datasets` and others keep beside it."""
    parts = path.relative_to(folder).parts
    return any(part.startswith((".", "_")) for part in parts) or path.name in (
        "dataset_info.json",
        "dataset_infos.json",
    )


def _split(path: Path) -> str | None:
    """What the name of a file or of a folder above it says, the nearest first."""
    for part in reversed(path.parts):
        for word in re.split(r"[-_. ]", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def _looks_like_path(data: str) -> bool:
    return bool(suffix_of(Path(data))) or data.startswith(("/", ".", "~")) or data.count("/") > 1


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"producer.data = {path} is not there, nor is its folder {folder.absolute()}. Correct the path."
    return f"producer.data = {path} is not there{near(path)}. Correct the path."


def _instead(folder: Path) -> str:
    if not folder.is_dir():
        return f", and there is no folder {folder.absolute()}"
    names = list(_some(folder))
    return f" (in {folder.absolute()} there are {', '.join(names)})" if names else f" ({folder.absolute()} is empty)"


def _some(folder: Path) -> Iterator[str]:
    yield from sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))[:3]
