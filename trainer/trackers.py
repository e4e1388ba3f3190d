"""Where the figures of a training go: TensorBoard's files and W&B, each in the drafter's folder. Imported on use.

RUN/drafters/NAME/tensorboard/    what `tensorboard --logdir` reads
                  wandb/          what W&B keeps on disk; offline runs lie there until `wandb sync`
                  wandb.json      the id of the W&B run: a training that is resumed goes on with it
"""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path
from typing import Any, Protocol

from draftfleet import drafters
from draftfleet.errors import SettingsError
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Trainer
from trainer.curve import Curve

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long W&B's server may take to answer before a run is kept on disk."""


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def begin(run: Run, knobs: Trainer, *, step: int) -> list[Tracker]:
    """The curve, and those that `trainer.trackers` names, for a training that goes on after `step`.

    Raises SettingsError.
    """
    known = {"tensorboard": TensorBoard, "wandb": Wandb}
    named = [known[name](run, knobs.drafter, step) for name in dict.fromkeys(knobs.trackers)]
    return [Curve(run, knobs.drafter, step), *named]


class TensorBoard:
    """Its files are written by a thread: a folder that takes no more of them ends the curves, not the training."""

    def __init__(self, run: Run, drafter: str, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # noqa: PLC0415 (imported on use)

        # What a run that was cut off logged after its latest checkpoint is replaced, not shown twice.
        self._writer = SummaryWriter(str(run.drafter_dir(drafter) / "tensorboard"), purge_step=step + 1)
        self._has_ended = False

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._has_ended:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        if not self._has_ended:
            log.warning(event("tensorboard ended", error=error))
        self._has_ended = True


class Wandb:
    """One W&B run for one drafter, over all its starts. WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and WANDB_API_KEY hold.

    Without a server's answer, or a key, the run is kept on disk and that is said: training goes on.
    """

    def __init__(self, run: Run, drafter: str, step: int) -> None:
        try:
            import wandb  # noqa: PLC0415 (imported on use)
        except ImportError as error:
            raise SettingsError(
                f"trainer.trackers names wandb, which cannot be imported here ({error}): `pip install wandb`, or "
                'leave it out: trainer.trackers = ["tensorboard"].'
            ) from None
        folder = run.drafter_dir(drafter)
        folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "id": _run_id(run, drafter),
            "name": f"{run.name}/{drafter}",
            "dir": str(folder),
            "config": drafters.read(run, drafter, "drafter-settings.json") or {},
            "resume": "allow",
        }
        settings = wandb.Settings(
            silent=True, console="off", disable_code=True, disable_git=True, init_timeout=ANSWER_S
        )
        try:
            self._run = wandb.init(**options, settings=settings)
        except wandb.Error as error:
            log.warning(event("wandb did not answer", error=error))
            wandb.teardown()  # its process holds the id
            self._run = wandb.init(**options, settings=settings, mode="offline")
        folder = Path(self._run.dir).parent
        if self._run.offline:
            log.warning(event("wandb keeps the run on disk", send=f"wandb sync {folder}"))
        else:
            log.info(event("wandb run begun", url=self._run.url))
        # Steps that were logged after the checkpoint come again; W&B's own count of steps may not go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


def _run_id(run: Run, drafter: str) -> str:
    """Of the drafter's W&B run. Deleted with the drafter's folder, so that one begun anew has a run of its own."""
    path = f"{run.name}/drafters/{drafter}/wandb.json"
    run.storage.put_if_absent(path, (json.dumps({"id": uuid.uuid4().hex[:12]}) + "\n").encode())
    return str((drafters.read(run, drafter, "wandb.json") or {})["id"])
