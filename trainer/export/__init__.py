"""From a checkpoint to folders that engines serve.

    export/vllm/     config.json  model.safetensors  export.json
    export/sglang/   config.json  model.safetensors  export.json

The tensors are the same; the layer ids are not, and an engine given the other's folder would read the wrong layers
without a word. `export.json` says where a folder comes from, with the layer ids in both countings.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import draftfleet
from draftfleet.drafters import fetch, share
from draftfleet.errors import DrafterError, TargetError
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from trainer import checkpoint
from trainer import drafter as drafters
from trainer.drafter import DrafterConfig
from trainer.export import native
from trainer.export.check import check
from trainer.export.formats import FORMATS, format_named, serve_command

__all__ = ["FORMATS", "check", "export", "serve_command"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint an export is made from."""

    name: str
    step: int
    config: DrafterConfig
    tensors: dict[str, Tensor]
    dtype: str


def export(settings: Settings, formats: list[str]) -> dict[str, Path]:
    """Export the newest checkpoint of `trainer.drafter` of the run, to all formats where none is named.

    Each folder is written aside, read again and checked, and then put in place; an older export is replaced, a newer
    one never. Raises DrafterError, RunMissing, SettingsError or TargetError.
    """
    names = formats or list(FORMATS)
    for name in names:
        format_named(name)
    run = Run.open(open_storage(settings.storage), settings.run)
    folder = run.drafter_dir(settings.trainer.drafter)
    for part in ("checkpoints", "export"):
        fetch(run, settings.trainer.drafter, part)
    newest = checkpoint.latest(folder)
    if newest is None:
        raise DrafterError(f"{folder} has no whole checkpoint: train first with `draftfleet train --run {run.name}`.")
    config, tensors = drafters.load(newest)
    dtype = _dtype(settings, config)
    source = _Source(settings.trainer.drafter, checkpoint.step_of(newest), config, tensors, dtype)
    exported = {name: _export_one(source, name, folder / "export" / name) for name in names}
    share(run, settings.trainer.drafter, "export")
    return exported


def _dtype(settings: Settings, config: DrafterConfig) -> str:
    """The target's unless set: engines run a drafter in the target's type and convert it as they load it.

    A float32 folder beside a bfloat16 target would only be twice as large, and SGLang reads float32 as float16.
    """
    if settings.export.dtype != "auto":
        return settings.export.dtype
    from transformers import AutoConfig  # noqa: PLC0415 - takes a second, and only this needs it

    path = settings.target.path or config.target
    try:
        dtype = AutoConfig.from_pretrained(path).get_text_config().dtype
    except (OSError, ValueError) as error:
        raise TargetError(
            f"the target {path or '(unset)'} could not be asked for its dtype: {error} "
            "Set target.path to its folder, or export.dtype to bfloat16, float16 or float32."
        ) from None
    return str(dtype or torch.float32).removeprefix("torch.")


def _export_one(source: _Source, format_name: str, folder: Path) -> Path:
    replaced = _step_of(folder)
    if replaced is not None and replaced > source.step:
        raise DrafterError(
            f"{folder} holds step {replaced}, newer than the newest checkpoint, step {source.step}: "
            "delete it if the older drafter is meant to replace it."
        )
    staged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        _write(staged, source, format_name)
        check(staged, format_name, source.config)
        _put(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    log.info(
        event(
            "drafter exported",
            format=format_name,
            step=source.step,
            replaced_step=replaced,
            dtype=source.dtype,
            folder=folder,
        )
    )
    return folder


def _write(folder: Path, source: _Source, format_name: str) -> None:
    config = {
        **native.config(source.config, source.dtype),
        **format_named(format_name).write_layers(source.config.layers),
    }
    manifest = {
        "format": format_name,
        "drafter": source.name,
        "step": source.step,
        "target": source.config.target,
        "num_target_layers": source.config.num_target_layers,
        "layers_after": source.config.layers,
        "layers_before": [layer + 1 for layer in source.config.layers],
        "draftfleet": draftfleet.__version__,
    }
    tensors = {name: tensor.to(getattr(torch, source.dtype)).contiguous() for name, tensor in source.tensors.items()}
    folder.mkdir(parents=True)
    (folder / native.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / native.MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    save_file(tensors, folder / native.TENSORS, metadata={"format": "pt"})


def _put(staged: Path, folder: Path) -> None:
    """Put a finished folder in place of an older one. A reader meets the old one, none, or the new one; never a mix."""
    old = folder.with_name(f"{staged.name}.old")
    if folder.exists():
        folder.rename(old)
    staged.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _step_of(folder: Path) -> int | None:
    """The step of an earlier export; None if there is none. Raises DrafterError for a folder that is not ours."""
    if not folder.exists():
        return None
    try:
        return int(json.loads((folder / native.MANIFEST).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DrafterError(
            f"{folder} is there and is no export of draftfleet ({error!r}): move it away, it is not overwritten."
        ) from None
