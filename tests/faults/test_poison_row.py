"""A row that ends every worker that asks for it: it is cornered, its neighbours are answered, and it may be revived."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftfleet.accounting import Accountant
from draftfleet.dead import revive
from draftfleet.letters import Filter
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

POISON = "Question 2?"


def test_a_row_that_ends_every_worker_is_given_up_alone(
    settings: Settings, run: Run, make_prompts: Callable[..., list[Prompt]], until: Callable[..., Any], tmp_path: Path
) -> None:
    prompts = make_prompts(6)
    accountant = Accountant(run)
    with FakeServer(model="tiny") as server:
        server.fault("hang", contains=POISON)
        settings = changed(
            settings,
            worker__servers=[server.url],
            worker__checkpoint_interval_s=0.1,
            worker__probe_interval_s=0.2,
            claims__ttl_s=1.0,
            claims__renew_s=0.2,
            claims__sweep_s=0.2,
            claims__reconcile_s=1,
            claims__grace_s=1,
            claims__max_attempts=2,
        )
        enqueue(settings, run, prompts, batch_size=6)

        def times_asked() -> int:
            return sum(row["requests"] for text, row in server.stats()["rows"].items() if POISON in text)

        num_kills = 0
        while accountant.account().pending and num_kills < 12:
            before = times_asked()
            with WorkerProcess(settings, tmp_path / f"worker-{num_kills}.log") as worker:
                until(lambda asked=before: times_asked() > asked or not accountant.account().pending)
                if accountant.account().pending:
                    worker.send(signal.SIGKILL)
                    worker.wait()
                    num_kills += 1

        rows = server.stats()["rows"]

    account = accountant.account()
    assert (account.ok + account.truncated, account.failed, account.pending, account.dead) == (5, 1, 0, 1)
    # Each end may cost what was in flight or not yet saved, and each worker asks one of the rows as its canary.
    assert sum(row["requests"] for text, row in rows.items() if POISON not in text) <= 6 * (num_kills + 1)
    assert account.holds
    [(batch, dead)] = run.dead().items()
    assert dead.messages[-1]["content"] == POISON
    assert batch.startswith("train-000000.")
    assert dead.error_kind == "worker"
    assert num_kills >= 2

    with FakeServer(model="tiny") as server:
        revived = changed(settings, worker__servers=[server.url])
        said = revive(revived, Filter(kind=("worker",)), every=False, dry_run=False)
        with WorkerProcess(revived, tmp_path / "worker.log"):
            until(lambda: not accountant.account().pending, what="the revived row")
    account = accountant.account()
    assert said["rows"] == 1
    assert (account.ok + account.truncated, account.failed, account.dead) == (6, 0, 0)
    assert account.holds
