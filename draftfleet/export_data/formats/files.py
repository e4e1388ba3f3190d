"""Numbered files of about one size: `train-00000-of-00003`. How many there are is known at the end, and named then."""

from __future__ import annotations

import os
from pathlib import Path


class Files:
    """Paths to write to, one after the other. `name` has `{number}`, and the split or nothing before it."""

    def __init__(self, folder: Path, stem: str, suffix: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.paths: list[Path] = []
        self._folder = folder
        self._stem = stem
        self._suffix = suffix

    def next(self) -> Path:
        self.paths.append(self._folder / f"{self._stem}-{len(self.paths):05d}{self._suffix}")
        return self.paths[-1]

    def finish(self) -> list[Path]:
        """Give the files their names, durably."""
        total = len(self.paths)
        for number, path in enumerate(self.paths):
            name = path.with_name(f"{self._stem}-{number:05d}-of-{total:05d}{self._suffix}")
            path.rename(name)
            self.paths[number] = name
            sync(name)
        sync(self._folder)
        return self.paths


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
