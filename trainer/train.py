"""The training loop: rows from the feed, hidden states from the target, a loss from the algorithm, one step at a time.

    python -m trainer.train                                          one process
    python -m torch.distributed.run --nproc-per-node 8 -m trainer.train     one per GPU

Settings come as everywhere, from the file and the environment. The trainer's Celery worker starts it with `--tied`: it
then ends with its parent. SIGTERM and SIGINT end it after the step at hand, with a checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from draftfleet import children, drafters, logs
from draftfleet.errors import DrafterError, DraftfleetError, TrainingError
from draftfleet.logs import event
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, Trainer, load
from draftfleet.storage import open_storage
from trainer import algorithms, best, checkpoint, claim, drafter, metrics, optimizers, targets
from trainer.acceptance import Judge
from trainer.algorithms import Algorithm
from trainer.batches import ORDER
from trainer.best import Acceptance
from trainer.checkpoint import State
from trainer.child import check_processes
from trainer.data import Feed, Journal, Position, Step
from trainer.devices import choose_device, choose_dtype
from trainer.metrics import Meter
from trainer.optimizers import Optimizer
from trainer.pinned import pin
from trainer.prefetch import Prefetch, depth_of
from trainer.progress import Progress
from trainer.schedule import learning_rate
from trainer.spelling import Spelling
from trainer.targets import Row, Target
from trainer.team import Team

log = logging.getLogger("trainer.train")  # __name__ is "__main__" in the process that trains

STOPPED = 128 + signal.SIGTERM
"""Exit code of a training that was asked to stop: its checkpoint is written, a new start resumes."""


def train(settings: Settings, stop: threading.Event) -> bool:
    """Train the drafter that the settings name, from its latest checkpoint. False if it was stopped before its end."""
    knobs = settings.trainer
    run = Run.open(open_storage(settings.storage), settings.run)
    device = choose_device(knobs.device)
    team = Team.join(device)
    check_processes(team.size, knobs.accumulation)
    if team.leads:
        pin(run, settings)
    path = _latest(run.drafter_dir(knobs.drafter), team)
    if path is not None and checkpoint.step_of(path) >= knobs.max_steps and not _is_unmeasured(run, knobs, path, team):
        log.info(event("training had finished already", run=run.name, drafter=knobs.drafter, checkpoint=path))
        if team.leads:
            Progress.finish(run, knobs.drafter, checkpoint.step_of(path))
        team.leave()
        return True
    torch.manual_seed(knobs.seed)
    target = targets.load(settings, algorithms.layers_seen(settings), device)
    held = drafter.load_config(path) if path is not None else None
    algorithm = algorithms.begin(run, settings, target, team, stop, held=held)
    if algorithm is None:
        team.leave()
        return False
    may_put = claim.check(settings, run)
    finished = fit(
        run, knobs, target, algorithm, team,
        stop=stop, may_put=may_put, inspect=Spelling(settings.target.path).check,
        judge=Judge(run, settings, algorithm, target, team, stop=stop, may_put=may_put),
    )  # fmt: skip
    team.leave()
    return finished


def fit(
    run: Run,
    knobs: Trainer,
    target: Target,
    algorithm: Algorithm,
    team: Team,
    *,
    stop: threading.Event,
    may_put: Callable[[], bool] = lambda: True,
    inspect: Callable[[list[Sample]], None] = lambda _: None,
    judge: Judge | None = None,
) -> bool:
    """Train `algorithm` for `max_steps` steps, from the latest checkpoint if there is one. False if stopped before.

    `may_put` is asked before each checkpoint; `inspect` is shown the samples of each new shard and may raise; `judge`
    measures at the steps that it says.
    """
    folder = run.drafter_dir(knobs.drafter)
    weights = [weight for weight in algorithm.drafter.parameters() if weight.requires_grad]
    optimizer = optimizers.make(knobs, algorithm.drafter)
    state, journal = _resume(folder, algorithm, optimizer, team)
    in_bfloat16 = choose_dtype(knobs.dtype, target.device) == torch.bfloat16
    log.info(event("training started", run=run.name, drafter=knobs.drafter, step=state.step, processes=team.size))

    depth = depth_of(knobs, target.device)
    meter = Meter(run, knobs, state, speaks=team.leads)
    feed = Feed(
        run, knobs, len(target.embedding), team,
        journal=journal, stop=stop, on_wait=meter.waiting if depth == 0 else lambda _: None, inspect=inspect,
    )  # fmt: skip
    positions: deque[Position] = deque()  # after each step that was drawn: whoever captures draws ahead of the loop
    steps = islice(feed.steps(state.position, knobs.accumulation), max(knobs.max_steps - state.step, 0))
    captures = target.capture(_own_batches(steps, team, positions))
    prefetch = Prefetch(captures, feed, depth=depth, device=target.device, on_idle=meter.waiting)
    with meter, prefetch as batches:
        own = range(team.rank, knobs.accumulation, team.size)
        saved_step = state.step

        def save() -> None:
            if team.leads:
                checkpoint.expect_place(run, state.step)
                checkpoint.write(
                    folder,
                    config=algorithm.config,
                    tensors=algorithm.drafter.state_dict(),
                    state=state,
                    optimizer=optimizer.state_dict(),
                    journal=feed.journal_now(),
                    keep=knobs.keep_checkpoints,
                    spare=best.spared(folder),
                    may_put=may_put,
                )
                drafters.share(run, knobs.drafter, "checkpoints")
                meter.saved(state, feed)

        def measure() -> bool:
            """Measure what is due at this step. False if asked to stop before its end: it is still to be done."""
            if judge is None or not judge.is_due(state.step):
                return True
            return judge.measure(state.step, lambda acceptance: meter.measured(acceptance, feed))

        is_measured = measure()  # the checkpoint that a training resumes from may not have been
        stopping = not is_measured
        while state.step < knobs.max_steps and not stopping:
            # Forward and backward: gradients add up over this process' batches of the step.
            sums, keys = metrics.begin(), list[str]()
            for captured in islice(batches, len(own)):
                with torch.autocast(target.device.type, torch.bfloat16, enabled=in_bfloat16):
                    loss = algorithm.loss(algorithm.collate(captured))
                keys += [one.row.key for one in captured]
                loss.total.backward()
                # Looked at after the backward pass was begun: a look waits for the GPU.
                _expect_finite(loss.total, "loss", state.step, keys[-len(captured) :])
                metrics.tally(sums, loss, captured)
            if sums["batches"] < len(own):  # asked to stop while it waited for samples
                break

            # Gradients of all processes, by the weight of the whole step: exact, however the tokens were dealt out.
            sums["stop"] = float(stop.is_set())
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            sums = team.add_up(gradients, sums)
            for gradient in gradients:
                gradient.div_(sums["weight"] or 1)
            norm = clip_grad_norm_(weights, knobs.clip)
            _expect_finite(norm, "gradient", state.step, keys)

            # The update.
            rate = learning_rate(
                state.step, peak=knobs.lr, max_steps=knobs.max_steps, warmup=knobs.warmup, shape=knobs.schedule
            )
            optimizers.set_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad()
            state = State(
                step=state.step + 1,
                tokens=state.tokens + int(sums["row_tokens"]),
                trained_tokens=state.trained_tokens + int(sums["tokens"]),
                position=positions.popleft(),
            )

            meter.add(sums)
            if state.step % knobs.log_steps == 0 or state.step == knobs.max_steps:
                meter.report(state, feed, batches, rate=rate, norm=float(norm))
            if state.step % knobs.checkpoint_steps == 0 or (judge is not None and judge.is_due(state.step)):
                save()
                saved_step = state.step
            is_measured = measure()
            stopping = sums["stop"] > 0 or not is_measured
        if state.step > saved_step:
            save()
        is_finished = state.step >= knobs.max_steps and is_measured
        if is_finished:
            meter.finished(feed)
        return is_finished


def main() -> int:
    """The entry of the process. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.train", description="Train a drafter of a run.")
    parser.add_argument("--settings", help="TOML file; draftfleet.toml if it is there")
    parser.add_argument("--tied", action="store_true", help="end with the process that started this one")
    arguments = parser.parse_args()
    logs.setup("INFO" if os.environ.get("RANK", "0") == "0" else "WARNING")
    if arguments.tied:
        children.tie()
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    try:
        finished = train(load(arguments.settings), stop)
    except DraftfleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except torch.OutOfMemoryError as error:
        print(
            f"error: the GPU's memory is full: {str(error).splitlines()[0]} Lower trainer.batch_tokens (and raise "
            "trainer.accumulation as much) or trainer.max_length, or set trainer.dtype = bfloat16.",
            file=sys.stderr,
        )
        return TrainingError.exit_code
    return 0 if finished else STOPPED


def _own_batches(steps: Iterable[Step], team: Team, positions: deque[Position]) -> Iterator[list[Row]]:
    """This process' share of each step: batch n of a step goes to process n modulo the size of the team.

    Every process draws whole steps, so that all of them come to a wait for samples at the same point.
    """
    for step in steps:
        positions.append(step.then)
        for batch, epoch in list(zip(step.batches, step.epochs, strict=True))[team.rank :: team.size]:
            yield [kept.row(epoch) for kept in batch]


def _latest(folder: Path, team: Team) -> Path | None:
    """The checkpoint that process 0 chose."""
    path = team.share(str(checkpoint.latest(folder) or "") if team.leads else None)
    return Path(path) if path else None


def _is_unmeasured(run: Run, knobs: Trainer, path: Path, team: Team) -> bool:
    """Whether the acceptance of a last checkpoint is still to be measured: its writer ended before it could."""
    if knobs.evaluate_steps == 0:
        return False
    progress = Progress.read(run, knobs.drafter) if team.leads else None
    is_said = progress is not None and progress.finished
    return team.share(not is_said and Acceptance.find(path) is None if team.leads else None)


def _resume(folder: Path, algorithm: Algorithm, optimizer: Optimizer, team: Team) -> tuple[State, Journal | None]:
    """Load the latest checkpoint into drafter, optimizer and random generators; without one, a fresh state."""
    path = _latest(folder, team)
    if path is None:
        return State(), None
    held = checkpoint.read(path)
    # The target's folder may have moved.
    had, now = (asdict(replace(config, target="")) for config in (held.config, algorithm.config))
    if had != now:
        differences = ", ".join(f"{key} {had[key]!r}, now {now[key]!r}" for key in now if had[key] != now[key])
        raise DrafterError(f"checkpoint {path} is of another drafter: {differences}. Was target.path changed?")
    algorithm.drafter.load_state_dict(held.tensors)
    optimizer.load_state_dict(held.optimizer)
    held.random.restore()
    if held.order != ORDER and held.state.position.batch:
        log.warning(
            event(
                "batches are ordered otherwise than when the checkpoint was written",
                checkpoint=path,
                so=f"what is left of epoch {held.state.position.epoch} has some rows again and lacks others; "
                "the epochs after it have all",
            )
        )
    log.info(event("training resumed", checkpoint=path, step=held.state.step, tokens=held.state.tokens))
    return held.state, held.journal


def _expect_finite(value: Tensor, what: str, step: int, keys: list[str]) -> None:
    if not torch.isfinite(value):
        raise TrainingError(
            f"the {what} of step {step + 1} is {float(value.detach())}. Its rows: {', '.join(keys)}. "
            "Look at these samples; a lower trainer.lr or trainer.dtype = float32 helps where they are sound. "
            "The checkpoint before it is intact."
        )


if __name__ == "__main__":
    code = main()
    if code not in {0, STOPPED} and "RANK" in os.environ:
        # A thread may be in a collective that nobody else comes to any more: an orderly exit would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
