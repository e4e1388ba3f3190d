"""The process that trains: started under a claim, watched, ended with its claim or its parent."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from draftfleet import children, drafters
from draftfleet.errors import SettingsError, TrainingError
from draftfleet.health import Pulse
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings, Trainer, environment
from trainer import claim as claims
from trainer.claim import Claim
from trainer.progress import Progress

log = logging.getLogger(__name__)

TRAINING = "training"
"""The part of the trainer's pulse that watches the child and renews the claim."""

LOOK_S = 0.5
REPORT_S = 3.0
"""Seconds between task events: Flower keeps each in memory."""

STOP_S = 45.0
"""How long a child that was asked to stop may take for its checkpoint."""


def check_processes(processes: int, accumulation: int) -> None:
    """Raises SettingsError if a step has fewer batches than there are processes."""
    if processes > accumulation:
        raise SettingsError(
            f"trainer.processes = {processes} is more than trainer.accumulation = {accumulation}: the batches of a "
            "step are dealt out to the processes, so that their number changes the speed and not the result. "
            f"Set trainer.accumulation to {processes} or a multiple of it."
        )


def check_measuring(knobs: Trainer) -> None:
    """Raises SettingsError if acceptance is to be measured with a target that is not in the training process."""
    if knobs.evaluate_steps and knobs.target != "hf":
        raise SettingsError(
            f"trainer.evaluate_steps = {knobs.evaluate_steps}: acceptance is measured with the target in the training "
            f"process, and trainer.target = {knobs.target} has it elsewhere. Set it to 0 and measure later with "
            "`draftfleet evaluate --checkpoint all`, or set trainer.target = hf."
        )


def command(processes: int) -> list[str]:
    """The training process, or torchrun with one per GPU."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"] if processes > 1 else []
    return [sys.executable, "-m", *launcher, "trainer.train", "--tied"]


def supervise(
    run: Run,
    settings: Settings,
    claim: Claim,
    *,
    stop: threading.Event,
    report: Callable[[str], object],
    pulse: Pulse,
) -> str:
    """Have the drafter trained by a child until it ends, the claim is lost or `stop` is set. Returns how it ended.

    Raises TrainingError, with what the child said last, if it failed.
    """
    drafter = settings.trainer.drafter
    drafters.fetch(run, drafter, "checkpoints")
    output = run.drafter_dir(drafter) / "train.log"
    said_before = output.stat().st_size if output.exists() else 0
    child = children.spawn(
        command(settings.trainer.processes), log=output, env=environment(settings) | {claims.TOKEN: claim.token}
    )
    log.info(event("training begun", run=run.name, drafter=drafter, process=child.pid, log=output))
    try:
        _watch(child, run, drafter, claim, stop=stop, report=report, pulse=pulse)
    finally:
        code = children.stop(child, grace_s=0)
    shown = str(Progress.read(run, drafter) or "no step yet")
    if claim.is_lost:
        raise TrainingError(f"drafter {drafter} of run {run.name} was taken over by another trainer, at {shown}.")
    if code == 0:
        log.info(event("training finished", run=run.name, drafter=drafter, at=shown))
        return f"finished: {shown}"
    if stop.is_set():
        log.info(event("training stopped", run=run.name, drafter=drafter, at=shown))
        return f"stopped: {shown}"
    is_kept = any(run.storage.folders(f"{run.name}/drafters/{drafter}/checkpoints"))
    again = "goes on from its latest checkpoint" if is_kept else "begins it anew, with other settings if they are given"
    raise TrainingError(
        f"training of drafter {drafter} of run {run.name} ended with {_ending(code)} at {shown}:\n"
        f"{_last_words(output, said_before)}\n"
        f"All it said is in {output}. `draftfleet train --drafter {drafter}` {again}."
    )


def _watch(
    child: subprocess.Popen[bytes],
    run: Run,
    drafter: str,
    claim: Claim,
    *,
    stop: threading.Event,
    report: Callable[[str], object],
    pulse: Pulse,
) -> None:
    """Renew the claim and report, until the child ended or would not."""
    progress = Progress.read(run, drafter)
    saved_before = progress.checkpoint_step if progress else 0
    report_due, deadline = time.monotonic(), math.inf
    while child.poll() is None and time.monotonic() < deadline:
        pulse.turned(TRAINING)
        claim.renew_if_due(progress.checkpoint_step - saved_before if progress else 0)
        if deadline == math.inf and (claim.is_lost or stop.is_set()):
            child.terminate()
            deadline = time.monotonic() + STOP_S
        if time.monotonic() >= report_due and progress:
            report(str(progress))
            report_due = time.monotonic() + REPORT_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LOOK_S)
        progress = Progress.read(run, drafter) or progress


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = " (out of memory, if nobody killed it)" if code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"


def _last_words(output: Path, said_before: int, count: int = 15) -> str:
    """The child's error message, or its last lines if it could not give one."""
    with output.open("rb") as file:
        file.seek(said_before)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    words = lines[errors[0] :][:count] if errors else lines[-count:]
    return "\n".join(words) or "(it said nothing)"
