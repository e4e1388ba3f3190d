"""A run with rows that fail of every kind: listed, the server mended, revived, and in the end every row once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from draftfleet.accounting import Accountant
from draftfleet.dead import revive
from draftfleet.letters import EVERY, Filter, find
from draftfleet.names import batch_id, is_again
from draftfleet.outcomes import best
from draftfleet.queue import connect
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings, Trainer, environment
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

MakePrompts = Callable[..., list[Prompt]]
Until = Callable[..., Any]


def test_bad_rows_of_each_kind_are_listed_and_after_the_server_was_mended_revived_each_once(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    from trainer.data import START, Feed
    from trainer.team import Team

    prompts = make_prompts(24)
    accountant = Accountant(run)
    with FakeServer(model="tiny") as server:
        server.fault("status", status=422, contains="Question 3?")
        server.fault("abort", contains="Question 9?")
        server.fault("garbage", contains="Question 12?")
        settings = changed(
            settings,
            worker__servers=[server.url],
            worker__max_tries=2,
            claims__sweep_s=0.2,
            claims__reconcile_s=0.5,
            claims__grace_s=0.5,
        )
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: not accountant.account().pending, what="all rows to have an outcome")
            letters = {letter.kind: letter for letter in find(run)}
            before = accountant.account()

            server.clear()
            command = [sys.executable, "-m", "draftfleet", "dead", "revive", "--all"]
            said = subprocess.run(
                command, env=environment(settings), capture_output=True, text=True, timeout=60, check=True
            )
            until(lambda: not accountant.account().pending, what="the revived rows")
            again_nothing = revive(settings, EVERY, every=True, dry_run=False)
        asked = {text: row["requests"] for text, row in server.stats()["rows"].items()}
        log = worker.log.read_text()

    account = accountant.account()
    assert {kind: letter.status for kind, letter in letters.items()} == {
        "bad_request": 422,
        "transient": None,
        "unusable": 200,
    }
    assert all(letter.server == server.url and letter.time and letter.worker for letter in letters.values())
    assert "Bad gateway" in letters["unusable"].message
    assert (before.failed, before.pending) == (3, 0)
    assert '"rows": 3' in said.stdout
    assert again_nothing["rows"] == 0
    assert (account.ok + account.truncated, account.failed, account.pending) == (24, 0, 0)
    assert account.holds
    assert not list(find(run))
    assert "Question 3?" not in said.stdout + said.stderr + log
    done = run.done()
    assert [batch for batch in done if not is_again(batch)] == names
    kept = best(sample for batch in done for sample in run.read_samples(batch))
    assert len(kept) == 24
    assert {sample.outcome for sample in kept.values()} <= {"ok", "truncated"}
    canary, refused, broken_off = 1, 1, 2
    assert sum(asked.values()) == 24 + canary + refused + 2 * broken_off

    knobs = Trainer(drafter="d", max_steps=4, batch_tokens=4096, max_length=2048, device="cpu")
    feed = Feed(run, knobs, 2**31 - 1, Team.alone())
    seen = Counter(
        row.key
        for step in islice(feed.steps(START, 1), 200)
        if step.then.epoch == 0
        for batch in step.batches
        for row in batch
    )
    assert set(seen.values()) == {1}
    assert seen.keys() == {prompt.row_key for prompt in prompts}


def test_rows_are_revived_while_the_run_is_still_asked_and_while_nobody_hears_of_it(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    accountant = Accountant(run)
    with FakeServer(model="tiny", latency_s=0.05) as server:
        server.fault("status", status=400, contains="Question 1?")
        settings = changed(
            settings,
            worker__servers=[server.url],
            worker__concurrency=2,
            claims__reconcile_s=0.5,
            claims__grace_s=0.5,
        )
        enqueue(settings, run, make_prompts(40))
        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: list(find(run)), what="the first dead letter")
            server.clear()
            said = revive(settings, Filter(kind=("bad_request",)), every=False, dry_run=False)
            meanwhile = accountant.account()
            connect(settings).flushall()
            until(lambda: not accountant.account().pending, what="all rows")

    account = accountant.account()
    assert said["rows"] == 1
    assert meanwhile.holds
    assert meanwhile.failed == 0
    assert (account.ok + account.truncated, account.failed) == (40, 0)
    assert account.holds


def test_a_batch_without_readable_prompts_is_a_dead_letter_until_they_are_restored(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        settings = changed(
            settings,
            worker__servers=[server.url],
            claims__reconcile_s=0.5,
            claims__grace_s=0.5,
        )
        run.write_prompts(batch_id("train", 0), make_prompts(4))
        sound = run.storage.read("run/prompts/train-000000.jsonl.gz")
        run.storage.put("run/prompts/train-000000.jsonl.gz", sound[:40])
        enqueue(settings, run, make_prompts(4, start=4))
        with WorkerProcess(settings, tmp_path / "worker.log"):
            [letter] = until(lambda: list(find(run)), what="the note of a worker")
            run.storage.put("run/prompts/train-000000.jsonl.gz", sound)
            until(lambda: len(run.done()) == 2, what="both batches")

    assert (letter.kind, letter.batch) == ("unreadable", "train-000000")
    assert "cannot be read" in letter.message
    assert not list(find(run))
