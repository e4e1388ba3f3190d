"""The best checkpoint of a drafter: by acceptance that was measured on held-out prompts, not by loss.

checkpoints/step-000400/acceptance.json     what was measured of this checkpoint
best.json                                   the best of them, for `draftfleet status` and for people
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from draftfleet import drafters
from draftfleet.errors import DrafterError, StorageUnwritable
from draftfleet.logs import event
from draftfleet.runs import Run
from trainer import checkpoint

log = logging.getLogger(__name__)

FILE, BEST = "acceptance.json", "best.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Measured of one checkpoint: greedy, at most `k` tokens drafted a pass, answers of at most `max_tokens`.

    `asked` is a digest of k, the limit and the prompts' ids: what was measured on other prompts does not compare.
    """

    step: int
    acceptance_length: float
    acceptance_per_position: list[float]
    k: int
    prompts: int
    max_tokens: int
    drafts: int
    seconds: float
    asked: str

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """Of a checkpoint; None if it was not measured."""
        try:
            return cls(**json.loads((path / FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def record(self, path: Path) -> None:
        """Beside the weights that it was measured of, in one step. Raises StorageUnwritable on a full folder."""
        staged = path / f".{FILE}.{os.getpid()}"
        try:
            staged.write_text(json.dumps(asdict(self), indent=2) + "\n")
            staged.replace(path / FILE)
        except OSError as error:
            raise StorageUnwritable(
                f"could not write {path / FILE}: {error}. Make room or make it writable; the checkpoint is whole."
            ) from error


def find(folder: Path) -> tuple[Path, Acceptance] | None:
    """The best checkpoint of a drafter's folder, of those that were asked what the newest measured one was asked.

    Of two alike the newer. None if none was measured.
    """
    measured = [(path, said) for path in checkpoint.whole(folder) if (said := Acceptance.find(path))]
    alike = [(path, said) for path, said in measured if said.asked == measured[0][1].asked]
    return max(alike, key=lambda one: one[1].acceptance_length, default=None)


def spared(folder: Path) -> Path | None:
    """The checkpoint that stays however old it gets."""
    found = find(folder)
    return found[0] if found else None


def announce(run: Run, drafter: str) -> Acceptance | None:
    """Name the best checkpoint in best.json. Returns what was measured of it."""
    found = find(run.drafter_dir(drafter))
    if found is None:
        return None
    path, said = found
    text = json.dumps({"checkpoint": path.name, **asdict(said)}, indent=2) + "\n"
    run.storage.put(f"{run.name}/drafters/{drafter}/{BEST}", text.encode())
    return said


def choose(run: Run, drafter: str, wanted: str = "") -> Path:
    """The checkpoint that is meant by `best`, `latest` or a step; where none is named, the best if any was measured.

    Brings what other nodes wrote, and logs which one was taken and why. Raises DrafterError where it is not there.
    """
    drafters.fetch(run, drafter, "checkpoints")
    folder = run.drafter_dir(drafter)
    there = list(checkpoint.whole(folder))
    if not there:
        raise DrafterError(
            f"run {run.name} has no checkpoint of drafter {drafter} in {folder}: train it with "
            f"`draftfleet train --run {run.name} --drafter {drafter}`, or name another with --drafter."
        )
    path, why = _chosen(folder, there, wanted, f"drafter {drafter} of run {run.name}")
    log.info(event("checkpoint chosen", run=run.name, drafter=drafter, checkpoint=path.name, because=why))
    return path


def _chosen(folder: Path, there: list[Path], wanted: str, name: str) -> tuple[Path, str]:
    if wanted not in ("", "best", "latest"):
        step = wanted.removeprefix("step-")
        for path in there:
            if step.isdecimal() and checkpoint.step_of(path) == int(step):
                return path, "it was named"
        steps = ", ".join(str(checkpoint.step_of(path)) for path in reversed(there))
        raise DrafterError(f"{name} has no checkpoint {wanted}: use best, latest, or a step that is there: {steps}.")
    found = find(folder)
    if wanted == "latest" or (found is None and wanted == ""):
        return there[0], "it is the latest" if wanted else "it is the latest, and none was measured"
    if found is None:
        raise DrafterError(
            f"no checkpoint of {name} was measured, so none is known to be the best: `draftfleet evaluate --checkpoint "
            "all` measures those that are there, trainer.evaluate_steps while it trains. Or take --checkpoint latest."
        )
    path, said = found
    return path, f"it is the best that was measured, at an acceptance length of {said.acceptance_length:.2f}"
