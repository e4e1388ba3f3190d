"""Following a run from outside until it is answered and trained on: what `draftfleet status --watch` shows, as bars."""

from __future__ import annotations

import time
from itertools import accumulate
from operator import mul
from typing import Any

from bars import Bars
from inference_server import InferenceServer
from rich.console import Console

from draftfleet import live
from draftfleet.accounting import Accountant, Accounting
from draftfleet.queue import connect
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.training import Training
from draftfleet.up.stack import Stack

LOOK_S = 0.5


class Pace:
    """Tokens per second, from the first request to the last shard."""

    def __init__(self, tokens_before: int = 0) -> None:
        self.tokens_per_s: float | None = None
        self._tokens_before = tokens_before
        self._began_at: float | None = None
        self._is_over = False

    def note(self, account: Accounting, reports: list[live.WorkerReport]) -> None:
        if self._began_at is None and any(report.rows_in_flight for report in reports):
            self._began_at = time.monotonic()
        elif self._began_at is not None and not self._is_over:
            self.tokens_per_s = (account.tokens - self._tokens_before) / (time.monotonic() - self._began_at)
            self._is_over = account.is_complete


def follow(settings: Settings, run: Run, stack: Stack, server: InferenceServer | None, console: Console) -> Pace:
    """Show bars until every row has an outcome and the drafter is trained.

    Raises the error of whatever ended before.
    """
    client, accountant = connect(settings), Accountant(run)
    training = Training(settings, run, client)
    pace = Pace(accountant.account().tokens)
    with Bars(console) as bars:
        while True:
            stack.check()
            if server:
                server.check()
                _show_server(bars, server)
            account, reports = accountant.account(), live.read(client)
            pace.note(account, reports)
            _show_samples(bars, account, reports, run)
            training.check()
            _show_training(bars, training)
            if account.is_complete and training.is_over:
                return pace
            time.sleep(LOOK_S)


def _show_server(bars: Bars, server: InferenceServer) -> None:
    if server.is_ready:
        bars.show("server", 1, 1, f"ready at {server.url if bars.is_wide else server.url.removeprefix('http://')}")
    else:
        bars.show("server", 0, 1, "loads the model")


def _show_samples(bars: Bars, account: Accounting, reports: list[live.WorkerReport], run: Run) -> None:
    """A report may still name rows whose shard has just been put: never show more than there are."""
    expected = account.rows if account.expected is None else account.expected
    parts = [part for report in reports for part in report.runs if part.run_id == run.run_id]
    finished = [] if account.is_complete else parts
    ok, truncated, failed = (
        getattr(account, outcome) + sum(getattr(part, outcome) for part in finished)
        for outcome in ("ok", "truncated", "failed")
    )
    ok = min(ok, expected - truncated - failed)
    rate = sum(server.tokens_per_s for report in reports for server in report.servers)
    outcomes = {"ok": ok, "truncated": truncated, "failed": failed}
    words = [f"{rows:,} {outcome}" for outcome, rows in outcomes.items() if bars.is_wide or rows or outcome == "ok"]
    if rate:
        words.append(f"{rate:,.0f} {'tokens/s' if bars.is_wide else 'tok/s'}")
    bars.show("samples", ok + truncated + failed, expected, ", ".join(words))


def _show_training(bars: Bars, training: Training) -> None:
    progress = training.progress
    steps = int(progress.get("max_steps", training.max_steps))
    words = _training_words(progress, is_wide=bars.is_wide)
    bars.show("training", int(progress.get("step", 0)), steps, words, waiting=bool(progress.get("waiting")))


def _training_words(progress: dict[str, Any], *, is_wide: bool) -> str:
    words = [f"loss {progress['loss']:.2f}"] if progress.get("loss") is not None else ["starting"]
    if accuracy := progress.get("accuracy"):
        # If each drafted token is right so often where all before it were, this many are kept per target step.
        acceptance = 1 + sum(accumulate(accuracy, mul))
        words.append(f"acceptance length about {acceptance:.2f}" if is_wide else f"acc {acceptance:.2f}")
    if progress.get("tokens_per_s"):
        words.append(f"{progress['tokens_per_s']:,.0f} {'tokens/s' if is_wide else 'tok/s'}")
    if progress.get("waiting"):
        words.append("waits for samples" if is_wide else "waits")
    return ", ".join(words)
