"""A drafter that training starts from: a folder of this trainer, or of an engine."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from draftfleet.errors import DrafterError
from trainer import checkpoint, drafter
from trainer.drafter import DrafterConfig
from trainer.export import importing
from trainer.export.shapes import EMBEDDING


def load(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """A drafter's folder in a run (its newest checkpoint), a checkpoint, or an engine's folder. Raises DrafterError."""
    if not folder.is_dir():
        raise DrafterError(f"eagle3.start_from = {folder}: there is no such folder on this machine.")
    newest = checkpoint.latest(folder)
    if newest is not None:
        return drafter.load(newest)
    found = importing.read(folder)
    return found.config, found.tensors | ({} if found.embedding is None else {EMBEDDING: found.embedding})
