"""Checkpoints: a drafter folder with all that an exact resume needs beside it, put in place in one step.

checkpoints/step-000200/drafter.json, drafter.safetensors    the drafter (trainer.drafter)
                        state.pt                             optimizer, step, random states, data position, tokens
                        journal.json                         the shards admitted, in order
                        acceptance.json                      how it was measured, if it was (trainer.best)
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftfleet.errors import CorruptFile, RunBusy, StorageUnreadable, StorageUnwritable
from draftfleet.logs import event
from draftfleet.runs import Run
from trainer import drafter
from trainer.batches import ORDER
from trainer.data import START, Journal, Position
from trainer.drafter import DrafterConfig

log = logging.getLogger(__name__)

DRAFTER, WEIGHTS, STATE, JOURNAL = "drafter.json", "drafter.safetensors", "state.pt", "journal.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where the training stands between two steps. `step` counts finished optimizer steps: the schedule's position."""

    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    position: Position = START


@dataclass(frozen=True, slots=True)
class RandomStates:
    """Of every generator that training may draw from."""

    torch: Tensor
    cuda: list[Tensor]
    python: tuple[Any, ...]

    @classmethod
    def now(cls) -> Self:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda, random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda and len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was read back, on the CPU. `order` is the way in which its training ordered batches."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    state: State
    optimizer: dict[str, Any]
    random: RandomStates
    journal: Journal
    order: str


def expect_place(run: Run, step: int) -> None:
    """Raises StorageUnreadable where the run is gone: what lies below a mount would take the checkpoint and hide it."""
    if not run.storage.exists(f"{run.name}/run.json"):
        raise StorageUnreadable(
            f"{run.storage.url} has no run {run.name} any more, so the checkpoint of step {step} is not written: mount "
            "the file system again, or bring the folder back. Then `draftfleet train` goes on from the one before."
        )


def write(
    folder: Path,
    *,
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    state: State,
    optimizer: dict[str, Any],
    journal: Journal,
    keep: int,
    spare: Path | None = None,
    may_put: Callable[[], bool] = lambda: True,
) -> Path:
    """Put the checkpoint of `state.step` into a drafter's folder, and delete all but the latest `keep` and `spare`.

    Raises RunBusy if `may_put` denies it, just before it is put in place; StorageUnwritable on a full folder.
    """
    final = of_step(folder, state.step)
    staged = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        shutil.rmtree(staged, ignore_errors=True)
        drafter.save(staged, config, tensors)
        random_states = RandomStates.now()
        stored = {
            "state": {**asdict(state), "position": list(state.position)},
            "order": ORDER,
            "optimizer": optimizer,
            "random": {"torch": random_states.torch, "cuda": random_states.cuda, "python": random_states.python},
        }
        _save(stored, staged / STATE)
        (staged / JOURNAL).write_text(json.dumps(journal.to_json(), indent=1) + "\n")
        for path in (*staged.iterdir(), staged):
            _sync(path)
        if not may_put():
            raise RunBusy(
                f"checkpoint {final} was not put in place: another trainer holds the claim on this drafter. "
                "This one stops; nothing of the other's work was touched."
            )
        if final.exists():  # one that could not be read, or it would have been resumed from
            shutil.rmtree(final)
        staged.rename(final)
        _sync(final.parent)
    except (OSError, SafetensorError) as error:
        raise StorageUnwritable(
            f"could not write checkpoint {final}: {error}. Make room or make it writable, then run `draftfleet train` "
            "again: training goes on from the checkpoint before it."
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    prune(folder, keep, spare)
    return final


def _save(stored: dict[str, Any], path: Path) -> None:
    """Raises OSError. To a file of ours, since torch's own hides why it could not write."""
    with path.open("wb") as file:
        try:
            torch.save(stored, file)
        except RuntimeError as error:  # nor can it end an archive that could not be written to
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a drafter's folder. Torn ones are left out, with a warning."""
    return next(whole(folder), None)


def whole(folder: Path) -> Iterator[Path]:
    """The whole checkpoints of a drafter's folder, the newest first. Torn ones are left out, with a warning."""
    found = (path for path in (folder / "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdigit())
    for path in sorted(found, key=step_of, reverse=True):
        fault = _fault(path)
        if fault is None:
            yield path
        else:
            log.warning(event("checkpoint left out", checkpoint=path, fault=fault))


def of_step(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def read(path: Path) -> Checkpoint:
    """Read a checkpoint back. Raises DrafterError or CorruptFile."""
    config, tensors = drafter.load(path)
    try:
        stored = torch.load(path / STATE, map_location="cpu", weights_only=True)
        fields: dict[str, Any] = stored["state"]
        fields["position"] = Position(*fields["position"])
        journal = Journal.from_json(json.loads((path / JOURNAL).read_text()))
        return Checkpoint(
            config,
            tensors,
            State(**fields),
            stored["optimizer"],
            RandomStates(**stored["random"]),
            journal,
            stored.get("order", ""),
        )
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise CorruptFile(
            f"checkpoint {path} cannot be read: {error}. Delete it to resume from the one before."
        ) from None


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, without reading its tensors."""
    try:
        for name in (DRAFTER, JOURNAL):
            json.loads((path / name).read_text())
        with safe_open(path / WEIGHTS, framework="pt"):
            pass
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)
    return None if zipfile.is_zipfile(path / STATE) else f"{path / STATE} is missing or torn"


def prune(folder: Path, keep: int, spare: Path | None = None) -> None:
    """Delete all whole checkpoints but the latest `keep` and `spare`."""
    for path in list(whole(folder))[keep:]:
        if path != spare:
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning(event("checkpoint not deleted", checkpoint=path, error=error))
    for path in (folder / "checkpoints").glob(".step-*"):  # what a writer that was killed left behind
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
