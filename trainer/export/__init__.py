"""From a checkpoint to folders that engines serve.

    export/vllm/          config.json  model.safetensors  export.json  README.md
    export/sglang/        config.json  model.safetensors  export.json  README.md
    export/speculators/   config.json  model.safetensors  export.json  README.md

The tensors are the same, but for their names; the layer ids are not, and an engine given the other's folder would read
the wrong layers without a word. `export.json` says where a folder comes from, with the layer ids in both countings.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import draftfleet
from draftfleet.drafters import fetch, share
from draftfleet.errors import DrafterError, StorageUnwritable, TargetError
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from trainer import best, checkpoint
from trainer import drafter as drafters
from trainer.drafter import DrafterConfig
from trainer.export import card
from trainer.export.check import check, refusals
from trainer.export.folder import CARD, CONFIG, MANIFEST, TENSORS, Manifest, Verifier, trained
from trainer.export.formats import FORMATS, format_named
from trainer.export.formats import serve_command as _serve_command
from trainer.export.shapes import EMBEDDING
from trainer.export.target import embedding, facts, licence

__all__ = ["FORMATS", "check", "export", "serve_command"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint an export is made from."""

    run: Run
    name: str
    step: int
    newest_step: int
    """Of the drafter's checkpoints here."""
    config: DrafterConfig
    tensors: dict[str, Tensor]
    dtype: str
    target: Verifier
    path: str
    """Of the target."""
    license: str | None


def export(settings: Settings, formats: list[str], *, license: str | None = None, which: str = "") -> dict[str, Path]:
    """Export a checkpoint of `trainer.drafter`, see `trainer.best.choose`; where no format is named, to all that can
    hold it.

    Each folder is written aside, read again and checked, and then put in place of an earlier export; one that is newer
    than every checkpoint here is never replaced. `license` is for the model card; unset, the target's. Raises
    DrafterError, RunMissing, SettingsError, StorageUnwritable or TargetError.
    """
    for name in formats:
        format_named(name)
    source = _source(settings, license, which)
    able = {name: refusals(source.config, name, source.target) for name in formats or FORMATS}
    refused = {name: reasons for name, reasons in able.items() if reasons}
    if refused and (formats or len(refused) == len(able)):
        lines = "\n".join(f"  {name}: {reason}" for name, reasons in refused.items() for reason in reasons)
        raise DrafterError(f"drafter {source.name} would not be served as it was trained:\n{lines}")
    for name, reasons in refused.items():
        log.warning(event("format left out", format=name, drafter=source.name, because="; ".join(reasons)))
    home = source.run.drafter_dir(source.name) / "export"
    exported = {name: _export_one(source, name, home / name) for name in able if name not in refused}
    share(source.run, source.name, "export")
    return exported


def serve_command(format_name: str, folder: Path, target: str, k: int) -> str:
    """The command line that serves `target` with the drafter in `folder`, at most `k` tokens drafted per step."""
    return shlex.join(_serve_command(format_name, folder, target, k))


def _source(settings: Settings, license: str | None, which: str) -> _Source:
    run = Run.open(open_storage(settings.storage), settings.run)
    name = settings.trainer.drafter
    chosen = best.choose(run, name, which)
    newest = checkpoint.latest(run.drafter_dir(name)) or chosen
    fetch(run, name, "export")
    config, tensors = drafters.load(chosen)
    path = settings.target.path or config.target
    dtype, architectures = _of_target(settings, path)
    target = Verifier(settings.export.target_name or _absolute(path), architectures)
    step, newest_step = checkpoint.step_of(chosen), checkpoint.step_of(newest)
    return _Source(run, name, step, newest_step, config, tensors, dtype, target, path, license or licence(path))


def _of_target(settings: Settings, path: str) -> tuple[str, list[str]]:
    """The type of the weights and the target's architectures.

    The type is the target's unless set: engines run a drafter in the target's type and convert it as they load it. A
    float32 folder beside a bfloat16 target would only be twice as large, and SGLang reads float32 as float16.
    """
    is_set = settings.export.dtype != "auto"
    try:
        found = facts(path)
    except TargetError as error:
        if not is_set:
            raise
        log.warning(event("target not asked for its architecture", error=error))
        return settings.export.dtype, []
    return settings.export.dtype if is_set else found.dtype, found.architectures


def _absolute(path: str) -> str:
    """A folder's path in full: engines are started elsewhere. A name of the hub stays one."""
    return str(Path(path).absolute()) if path and Path(path).is_dir() else path


def _export_one(source: _Source, format_name: str, folder: Path) -> Path:
    replaced = _step_of(folder)
    if replaced is not None and replaced > source.newest_step:
        raise DrafterError(
            f"{folder} holds step {replaced}, newer than the newest checkpoint, step {source.newest_step}: "
            "delete it if the older drafter is meant to replace it."
        )
    staged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        _write(staged, source, format_name)
        check(staged, format_name, source.config)
        (staged / CARD).write_text(_card(source, format_name), encoding="utf-8")
        _put(staged, folder)
    except (OSError, SafetensorError) as error:
        raise StorageUnwritable(
            f"could not write {folder}: {error}. Make room or make it writable, and export again; an earlier export is "
            "as it was."
        ) from error
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
    format = format_named(format_name)
    config = format.config(source.config, source.dtype, source.target)
    manifest = Manifest(
        format=format_name,
        drafter=source.name,
        step=source.step,
        target=source.target.name,
        target_architectures=source.target.architectures,
        num_target_layers=source.config.num_target_layers,
        layers_after=source.config.layers,
        layers_before=[layer + 1 for layer in source.config.layers],
        trained=trained(source.config) | {"target": source.target.name},
        draftfleet=draftfleet.__version__,
    )
    dtype = getattr(torch, source.dtype)
    tensors = {format.tensor_name(name): tensor for name, tensor in source.tensors.items()}
    if source.config.algorithm in format.WITH_EMBEDDING:
        tensors[EMBEDDING] = embedding(source.path, source.config.vocab_size, source.config.hidden_size)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})


def _card(source: _Source, format_name: str) -> str:
    config = source.config
    command = format_named(format_name).serve_command(
        Path("FOLDER"), config, card.shown(source.target.name), config.num_draft_tokens
    )
    return card.text(
        card.Facts(
            run=source.run,
            drafter=source.name,
            step=source.step,
            format=format_name,
            config=config,
            target=source.target.name,
            license=source.license,
            dtype=source.dtype,
            num_parameters=sum(tensor.numel() for tensor in source.tensors.values() if tensor.is_floating_point()),
            command=shlex.join(command),
        )
    )


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
        return int(json.loads((folder / MANIFEST).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DrafterError(
            f"{folder} is there and is no export of draftfleet ({error!r}): move it away, it is not overwritten."
        ) from None
