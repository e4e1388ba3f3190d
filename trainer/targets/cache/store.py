"""A folder of hidden states, one safetensors file a row, within a quota.

    FOLDER/TARGET/1-3-4/bfloat16/about.json      what lies here, for people
                                 3f/3f9c...safetensors   ids (T,), states (T, K+1, D), scales (T, K+1) of float8

A file is found by a digest of its row's token ids, so that every drafter with these layers has use for it, and an
answer that was asked again is another entry. What it says of target, layers and ids is compared when it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftfleet.errors import StorageUnwritable
from draftfleet.logs import event
from trainer.targets.cache.encoding import DTYPES

log = logging.getLogger(__name__)

GB = 1e9

LOOKS_PER_QUOTA = 50
"""The folder is measured again whenever this part of the quota was written: others may write into it, too."""


@dataclass(slots=True)
class Counts:
    """Rows of an epoch: read from the folder, captured, and of those, captured because they had no room."""

    read: int = 0
    captured: int = 0
    without_room: int = 0
    damaged: int = 0


class Store:
    """Entries of one target, one set of layers, one form. Several processes may use a folder at the same time."""

    def __init__(
        self, root: Path, target: str, layers: list[int], width: int, dtype: str,
        *, quota_bytes: float, min_free_bytes: float = 0, about: dict[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.root = root
        self.folder = root / target[:16] / "-".join(map(str, layers)) / dtype
        self.quota_bytes = quota_bytes
        self.min_free_bytes = min_free_bytes
        self.counts = Counts()
        self._shape = (len(layers) + 1, width)
        self._dtype = dtype
        self._said = {"version": "1", "target": target, "layers": json.dumps(layers), "dtype": dtype}
        self._processes = int(os.environ.get("WORLD_SIZE", "1"))
        self._is_full = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "about.json").write_text(json.dumps(self._said | (about or {}), indent=2) + "\n")
        except OSError as error:
            raise StorageUnwritable(
                f"the folder for hidden states, {self.folder}, cannot be written: {error.strerror}. "
                "Set cache.dir to a folder of this node that this user may write."
            ) from None
        self._measured = size_of(root)
        self._written = 0

    @property
    def used_bytes(self) -> int:
        """Of the whole folder, others' entries included, as last measured; and what was written since."""
        return self._measured + self._written * self._processes

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def read(self, ids: Tensor) -> dict[str, Tensor] | None:
        """What was kept for these ids (T,). None if nothing was, or nothing that can be trusted."""
        path = self._path(ids)
        try:
            with safe_open(path, framework="pt") as opened:
                metadata = opened.metadata() or {}
                kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dictionary
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            return self._distrust(path, str(error))
        if why := self._fault(ids, metadata, kept):
            return self._distrust(path, why)
        del kept["ids"]
        return kept

    def write(self, ids: Tensor, kept: dict[str, Tensor]) -> bool:
        """Keep it, whole or not at all. False if there is no room: said once."""
        num_bytes = sum(tensor.nbytes for tensor in kept.values()) + ids.nbytes
        if not self._has_room(num_bytes):
            self.counts.without_room += 1
            return False
        path = self._path(ids)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in ({"ids": ids.int()} | kept).items()}
        data = save(tensors, self._said | {"crc32": _checksum(tensors)})
        staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            path.parent.mkdir(exist_ok=True)
            staged.write_bytes(data)
            os.replace(staged, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)
            self._say_full(f"a file could not be written: {error.strerror}")
            self.counts.without_room += 1
            return False
        self._written += len(data)
        return True

    def entries(self) -> Iterator[Path]:
        return self.folder.glob("??/*.safetensors")

    def own_bytes(self) -> int:
        """Of this target, these layers and this form."""
        return size_of(self.folder)

    def _fault(self, ids: Tensor, metadata: dict[str, str], kept: dict[str, Tensor]) -> str:
        """Why a file is not what it should be. Empty if it is."""
        if any(metadata.get(name) != value for name, value in self._said.items()):
            return "it is of another target, other layers, or another form"
        if not torch.equal(kept.get("ids", ids.new_empty(0)), ids.int()):
            return "it is of other token ids"
        states = kept.get("states")
        if states is None or states.shape != (len(ids), *self._shape) or states.dtype != DTYPES[self._dtype]:
            return "its states are of another shape"
        if metadata.get("crc32") != _checksum(kept):
            return "its bytes are not those that were written"
        return ""

    def _has_room(self, num_bytes: int) -> bool:
        if self._written * self._processes > self.quota_bytes / LOOKS_PER_QUOTA:
            self._measured, self._written = size_of(self.root), 0
        if self.used_bytes + num_bytes > self.quota_bytes:
            self._say_full(f"cache.quota_gb = {self.quota_bytes / GB:g} is reached")
            return False
        if self.free_bytes - num_bytes < self.min_free_bytes:
            self._say_full(f"the disk has {self.free_bytes / GB:.2f} GB left")
            return False
        return True

    def _say_full(self, why: str) -> None:
        if not self._is_full:
            log.warning(event("hidden states not kept any more", why=why, captured="anew in each epoch"))
        self._is_full = True

    def _distrust(self, path: Path, why: str) -> None:
        self.counts.damaged += 1
        log.warning(event("hidden states captured anew", file=path, why=why))

    def _path(self, ids: Tensor) -> Path:
        name = hashlib.sha256(ids.int().cpu().numpy().tobytes()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.safetensors"


def size_of(folder: Path) -> int:
    """Bytes of all files in it and below. What vanishes meanwhile is not counted."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                total += size_of(Path(entry.path)) if entry.is_dir() else entry.stat().st_size
    return total


def _checksum(tensors: dict[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().tobytes(), crc)
    return f"{crc:08x}"
