"""What a training says about itself: log lines, trackers and progress.json. Only process 0 speaks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Trainer
from trainer import trackers, vocabulary
from trainer.algorithms import Loss
from trainer.best import Acceptance
from trainer.checkpoint import State
from trainer.data import Feed
from trainer.prefetch import Prefetch
from trainer.progress import Progress
from trainer.targets import Captured
from trainer.trackers import Tracker

log = logging.getLogger(__name__)

Sums = dict[str, float]
"""Of a step: `stop`, `batches`, `row_tokens`, `padded_tokens` (those of rows, and what pads them), `tokens` (with a
loss), `weight`, `loss`, and the algorithm's metrics."""


def begin() -> Sums:
    return {"stop": 0, "batches": 0, "row_tokens": 0, "padded_tokens": 0, "tokens": 0, "weight": 0, "loss": 0}


def tally(sums: Sums, loss: Loss, captured: list[Captured]) -> None:
    """Add one batch to the sums of its step."""
    sums["batches"] += 1
    lengths = [len(one.row.ids) for one in captured]
    sums["row_tokens"] += sum(lengths)
    sums["padded_tokens"] += len(lengths) * max(lengths)
    sums["tokens"] += loss.num_tokens
    sums["weight"] += loss.weight
    # All numbers at once: each look at one waits for the GPU.
    values = torch.stack([loss.total.detach().float(), *(value.float() for value in loss.metrics.values())]).tolist()
    for name, value in zip(("loss", *loss.metrics), values, strict=True):
        sums[name] = sums.get(name, 0) + value


class Meter:
    """Averages over the steps since the latest report."""

    def __init__(self, run: Run, knobs: Trainer, state: State, *, speaks: bool) -> None:
        self._run = run
        self._knobs = knobs
        self._speaks = speaks
        self._window = Counter[str]()
        self._since = time.monotonic()
        self._waited_s = self._starved_s = 0.0
        before = Progress.read(run, knobs.drafter) or Progress(step=0, max_steps=knobs.max_steps)
        self._progress = Progress(
            step=state.step,
            max_steps=knobs.max_steps,
            checkpoint_step=state.step,
            tokens=state.tokens,
            trained_tokens=state.trained_tokens,
            vocabulary_coverage=vocabulary.coverage(run, knobs.drafter),
            acceptance_length=before.acceptance_length,
            acceptance_step=before.acceptance_step,
        )
        self._trackers = list[Tracker]()

    def __enter__(self) -> Self:
        if self._speaks:
            self._trackers = trackers.begin(self._run, self._knobs, step=self._progress.step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in self._trackers:
            tracker.close()

    def add(self, sums: Sums) -> None:
        self._window.update(sums)

    def report(self, state: State, feed: Feed, states: Prefetch, *, rate: float, norm: float) -> None:
        """Log the averages and begin anew. Waits for samples are left out, those for hidden states have their share."""
        tokens = max(self._window["tokens"], 1)
        averages = {
            name: value / (self._window[f"count_{name.rpartition('_')[2]}"] or tokens)
            for name, value in self._window.items()
            if name not in begin() and not name.startswith("count_")
        }
        loss = self._window["loss"] / max(self._window["weight"], 1e-9)
        accuracy = _by_position(averages)
        busy_s = max(time.monotonic() - self._since - (states.starved_s - self._starved_s), 1e-9)
        figures = {
            "lr": rate,
            "grad_norm": norm,
            "tokens_per_s": self._window["row_tokens"] / busy_s,
            "real_tokens": self._window["row_tokens"] / max(self._window["padded_tokens"], 1),
            "waited_for_states": (states.waited_s - self._waited_s) / busy_s,
        }
        self._progress = replace(
            self._progress,
            step=state.step,
            tokens=state.tokens,
            trained_tokens=state.trained_tokens,
            loss=loss,
            accuracy=accuracy,
            tokens_per_s=figures["tokens_per_s"],
            waited_for_states=figures["waited_for_states"],
        )
        log.info(
            event(
                "steps done",
                run=self._run.name,
                step=f"{state.step}/{self._knobs.max_steps}",
                loss=loss,
                accuracy="/".join(f"{value:.3f}" for value in accuracy),
                **figures,
            )
        )
        for tracker in self._trackers:
            tracker.log(state.step, {**averages, "loss": loss, **figures})
        self._window.clear()
        self._since, self._waited_s, self._starved_s = time.monotonic(), states.waited_s, states.starved_s
        self._write(feed, waiting=False)

    def saved(self, state: State, feed: Feed) -> None:
        """Say that the checkpoint of this state is in place."""
        log.info(event("checkpoint written", run=self._run.name, drafter=self._knobs.drafter, step=state.step))
        self._progress = replace(
            self._progress,
            step=state.step,
            tokens=state.tokens,
            trained_tokens=state.trained_tokens,
            checkpoint_step=state.step,
        )
        self._write(feed, waiting=False)

    def measured(self, acceptance: Acceptance, feed: Feed) -> None:
        """Say what was measured of the newest checkpoint. The time that it took is not of the steps."""
        self._since += acceptance.seconds
        self._progress = replace(
            self._progress, acceptance_length=acceptance.acceptance_length, acceptance_step=acceptance.step
        )
        for tracker in self._trackers:
            tracker.log(acceptance.step, {"acceptance_length": acceptance.acceptance_length})
        self._write(feed, waiting=False)

    def finished(self, feed: Feed) -> None:
        """Say that the last checkpoint is in place, and measured if it was to be."""
        self._progress = replace(self._progress, finished=True)
        self._write(feed, waiting=False)

    def waiting(self, feed: Feed) -> None:
        """Say, once for each wait, that there is nothing to train on."""
        if not self._progress.waiting:
            log.info(event("waiting for samples", run=self._run.name, rows=feed.num_rows))
            self._write(feed, waiting=True)

    def _write(self, feed: Feed, *, waiting: bool) -> None:
        self._progress = replace(
            self._progress,
            rows_admitted=feed.num_rows,
            rows_not_trained=feed.not_trained,
            corrupt_shards=len(feed.corrupt),
            waiting=waiting,
        )
        if self._speaks:
            self._progress.write(self._run, self._knobs.drafter)


def _by_position(averages: dict[str, float]) -> list[float]:
    """`accuracy_0`, `accuracy_1`, ... in their order."""
    names = sorted((name for name in averages if name.startswith("accuracy_")), key=lambda name: int(name[9:]))
    return [averages[name] for name in names]
