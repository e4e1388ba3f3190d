"""Which weights lie in a folder, told without reading all of them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from draftfleet.errors import TargetError

SAMPLES_PER_FILE = 256
"""Tensors of a file that are looked into: all, in most files."""

SAMPLE_BYTES = 256


def fingerprint(path: str, *how: str) -> str:
    """SHA-256 of the configuration, of each safetensors file its header and some bytes of its tensors, and of `how`.

    A copy elsewhere has the same one; training or merging changes it. Raises TargetError.
    """
    digest = hashlib.sha256(" ".join(how).encode())
    try:
        for file in _files(path):
            if file.suffix == ".json":
                digest.update(json.dumps(json.loads(file.read_text()), sort_keys=True).encode())
                continue
            for part in _parts(file):
                digest.update(part)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise TargetError(
            f"target.path = {path}: its weights cannot be told apart from those of another target: {error}. Name a "
            "folder with config.json and safetensors, or set trainer.target to one that keeps no hidden states."
        ) from None
    return digest.hexdigest()


def _files(path: str) -> Iterator[Path]:
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - the name of a hub, or a folder

    yield Path(str(cached_file(path, "config.json")))
    index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    names = ["model.safetensors"]
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    for name in names:
        yield Path(str(cached_file(path, name)))


def _parts(file: Path) -> Iterator[bytes]:
    """The header of a safetensors file, and bytes from the middle of evenly chosen tensors."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = opened.read(length)
        yield header
        tensors = {name: one for name, one in json.loads(header).items() if name != "__metadata__"}
        ends = sorted({0, *(end for one in tensors.values() for end in one["data_offsets"])})
        spans = list(pairwise(ends))
        for begin, end in spans[:: max(1, len(spans) // SAMPLES_PER_FILE)]:
            opened.seek(8 + length + (begin + end) // 2)
            yield opened.read(min(SAMPLE_BYTES, end - (begin + end) // 2))
