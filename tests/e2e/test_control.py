"""Orders from afar to real workers: pause, resume, cancel, drain, priorities, budgets, deletion."""

from __future__ import annotations

import signal
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from draftfleet import children, control, deletion, drain, fleet, live, orders
from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.errors import RunBusy, RunError, RunMissing
from draftfleet.queue import connect, queued
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]

SHORT = {
    "claims__ttl_s": 3.0,
    "claims__renew_s": 0.5,
    "claims__sweep_s": 0.3,
    "claims__reconcile_s": 1,
    "claims__grace_s": 1,
    "worker__checkpoint_interval_s": 0.3,
    "worker__probe_interval_s": 0.2,
}


def of_run(settings: Settings, run: Run) -> Settings:
    return settings.model_copy(update={"run": run.name})


def asked(*servers: FakeServer) -> Counter[str]:
    """How often each text was asked for."""
    counts = Counter[str]()
    for server in servers:
        counts.update({text: row["requests"] for text, row in server.stats()["rows"].items()})
    return counts


def claimed(settings: Settings, run: Run) -> set[str]:
    return Claims(connect(settings), run.run_id, settings.claims, "test").held()


def metric(worker: WorkerProcess, name: str) -> float:
    """One without labels, from the worker's page."""
    url = worker.said("metrics served")[0].partition("url=")[2]
    with urllib.request.urlopen(url, timeout=30) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"draftfleet_{name} "))


def assert_complete(run: Run, prompts: list[Prompt]) -> None:
    """Every row once, none failed, and the account agrees."""
    samples = [sample for name in run.done() for sample in run.read_samples(name)]
    assert Counter(sample.row_key for sample in samples) == Counter(prompt.row_key for prompt in prompts)
    assert [sample.error for sample in samples if sample.outcome == "failed"] == []
    account = Accountant(run).account()
    assert (account.holds, account.pending) == (True, 0)


def test_a_paused_run_is_let_go_of_and_goes_on_where_it_was_also_after_redis_forgot_everything(
    settings: Settings, storage: FileStorage, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    other = Run.create(storage, "other", {"target.model": "tiny", "sampling.max_tokens": 64}, {})
    prompts, others = make_prompts(128), make_prompts(40, start=1000)
    redis = connect(settings)
    with FakeServer(model="tiny", latency_s=0.5) as server:  # 16 s for all, so that much is left when the pause is seen
        knobs = SHORT | {"worker__servers": [server.url], "worker__concurrency": 4, "worker__metrics_port": 0}
        settings = changed(settings, **knobs)
        names = enqueue(settings, run, prompts, batch_size=16)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["requests"] > 6, what="rows on the way")
            orders.pause(settings, reason="the GPUs are needed")
            until(lambda: worker.said("run paused") and not claimed(settings, run), what="the run let go of")
            until(lambda: live.read(redis)[0].rows_in_flight == 0, what="no row in flight")
            until(lambda: metric(worker, "messages_dropped_total") > 0, what="a message dropped")
            at_work = metric(worker, "rows_waiting"), metric(worker, "rows_in_flight")
            server.change(latency_s=0.01)
            done, before = run.done(), server.stats()["requests"]
            attempts = redis.hlen(f"draftfleet:{run.run_id}:attempts")
            redis.flushall()
            other_names = enqueue(of_run(settings, other), other, others, batch_size=8)
            until(lambda: other.done() == other_names, what="the other run")
            paused = run.done(), server.stats()["requests"] - before, control.read(run)

            orders.resume(settings)
            until(lambda: run.done() == names, what="the resumed run")
        counts = asked(server)

    assert attempts == 0
    assert at_work == (0, 0)  # so the alert for a worker that has rows and ends none stays quiet
    assert paused[0] == done != names
    assert paused[1] <= len(others) + 1  # its canary
    assert (paused[2].state, paused[2].reason) == ("paused", "the GPUs are needed")
    assert_complete(run, prompts)
    assert_complete(other, others)
    # Rows in flight were finished, all others had not been asked: none is asked twice, but for the canaries'.
    assert sum(counts.values()) <= len(prompts) + len(others) + 2


def test_a_cancelled_run_is_broken_off_and_its_messages_are_dropped(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny", latency_s=0.05) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4, **SHORT)
        enqueue(settings, run, make_prompts(400), batch_size=8)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(run.done, what="a first batch")
            server.change(latency_s=600)
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            orders.cancel(settings, reason="")
            until(lambda: server.stats()["in_flight"] == 0, what="the requests broken off")
            until(lambda: not claimed(settings, run) and not queued(connect(settings), "tiny"), what="nothing left")
            state = live.read(connect(settings))[0].state

            assert worker.is_running

    account = Accountant(run).account()
    assert state == "working"
    assert account.holds
    assert account.pending > 0
    assert control.read(run).state == "cancelled"


def test_a_drained_node_finishes_what_is_in_flight_and_the_other_takes_over_at_once(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(96)
    redis = connect(settings)
    with FakeServer(model="tiny", latency_s=1.5) as one, FakeServer(model="tiny", latency_s=0.2) as other:
        # Long claims: nothing may wait for one to lapse.
        settings = changed(settings, worker__concurrency=4, worker__probe_interval_s=0.2)
        first = WorkerProcess(changed(settings, worker__servers=[one.url]), tmp_path / "first.log")
        second = WorkerProcess(changed(settings, worker__servers=[other.url]), tmp_path / "second.log")
        names = enqueue(settings, run, prompts, batch_size=16)
        with first:
            until(lambda: one.stats()["requests"] > 2, what="rows on the way")
            [process] = [report.process for report in live.read(redis)]
            with second:  # it joins in mid-run
                until(lambda: other.stats()["requests"] > 6, what="rows on the way at the other")
                with pytest.raises(drain.UnknownNode, match=process):
                    drain.drain(settings, node="nobody", all_nodes=False, wait=True)

                said = drain.drain(settings, node=process, all_nodes=False, wait=True)

                code = first.wait()
                until(lambda: run.done() == names, what="all batches done")
        counts = asked(one, other)

    assert process in said
    assert code == 0
    assert first.said("drain ordered")
    assert_complete(run, prompts)
    assert sum(counts.values()) <= len(prompts) + 2


def test_rows_of_a_run_that_was_raised_go_first_and_of_one_that_was_lowered_last(
    settings: Settings, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    runs = [Run.create(storage, name, {"target.model": "tiny"}, {}) for name in ("late", "plain", "urgent")]
    late, plain, urgent = runs
    with FakeServer(model="tiny", latency_s=0.1) as server:
        settings = changed(
            settings, worker__servers=[server.url], worker__concurrency=1, worker__watermark_batches=1, **SHORT
        )
        for number, (run, rows) in enumerate(zip(runs, (8, 64, 16), strict=True)):
            enqueue(of_run(settings, run), run, make_prompts(rows, start=1000 * number), batch_size=4)
        orders.set_priority(of_run(settings, late), priority="low")
        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: len(plain.done()) >= 2, what="two batches of the plain run")
            before = len(plain.done()), len(urgent.done()), len(late.done())
            orders.set_priority(of_run(settings, urgent), priority="high")
            until(lambda: len(urgent.done()) == 4, what="the urgent run")
            plain_then, late_then = len(plain.done()), len(late.done())
            until(lambda: len(plain.done()) == 16, what="the plain run")
            late_at_last = len(late.done())
            until(lambda: len(late.done()) == 2, what="the late run")

    assert before[1:] == (0, 0)
    assert plain_then < 16
    assert late_then == 0
    assert late_at_last == 0
    assert all(Accountant(run).account().holds for run in runs)


def test_a_run_is_paused_at_its_budget_and_goes_on_when_it_is_raised(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(120)
    budget, slots = 400, 2
    with FakeServer(model="tiny", latency_s=0.5, tokens=40, spread=0) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=slots, **SHORT)
        orders.set_budget(settings, tokens=budget)
        names = enqueue(settings, run, prompts, batch_size=16)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: control.read(run).state == "paused", what="the pause")
            until(lambda: not claimed(settings, run), what="the run let go of")
            spent = sum(sample.completion_tokens for sample in finished(run))
            reason = control.read(run).reason
            with pytest.raises(RunError, match="runs budget run N"):
                orders.resume(settings)

            orders.set_budget(settings, tokens=None)
            server.change(latency_s=0)
            orders.resume(settings)
            until(lambda: run.done() == names, what="all batches done")

    row_tokens = max(sample.completion_tokens for name in names for sample in run.read_samples(name))
    # Late by a report, a look and the poll of the worker: 2 + 2.5 + 2 s at 4 rows a second; doubled for a busy machine.
    assert budget <= spent <= budget + row_tokens * (slots + 4 * 13)
    assert f"token budget of {budget} reached: " in reason
    assert worker.said("run paused")
    assert_complete(run, prompts)


def finished(run: Run) -> list[Any]:
    """Every row that is kept somewhere."""
    rows = [sample for name in run.partials() for sample in run.read_partial(name)]
    rows += [sample for name in run.done() for sample in run.read_samples(name)]
    return list({sample.row_key: sample for sample in rows}.values())


def test_a_run_is_deleted_once_nobody_works_on_it_and_nothing_of_it_is_left(
    settings: Settings, storage: FileStorage, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(settings)
    with FakeServer(model="tiny", latency_s=0.2) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=2, **SHORT)
        enqueue(settings, run, make_prompts(64), batch_size=8)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(run.done, what="a first batch")
            [process] = [report.process for report in live.read(redis)]
            with pytest.raises(RunBusy, match=process):
                deletion.delete(settings)
            still_there = run.done()

            orders.cancel(settings, reason="")
            until(lambda: not claimed(settings, run), what="the run let go of")
            deletion.delete(settings)
            again = Run.create(storage, "run", {"target.model": "tiny"}, {})
            prompts = make_prompts(16)
            names = enqueue(settings, again, prompts)
            until(lambda: again.done() == names, what="a new run of that name")
            worker.send(signal.SIGTERM)
            worker.wait()

    assert still_there
    assert not list(redis.scan_iter(f"draftfleet:{run.run_id}:*"))
    assert storage.exists(f".deleted/{run.run_id}.json")
    assert_complete(again, prompts)


def test_a_deletion_that_was_interrupted_goes_on_and_the_name_stays_taken_until_then(
    settings: Settings, storage: FileStorage, run: Run, make_prompts: MakePrompts
) -> None:
    enqueue(settings, run, make_prompts(16))
    control.bury(run)
    storage.delete_folder("run/prompts")

    with pytest.raises(RunMissing, match="runs delete run"):
        Run.create(storage, "run", {"target.model": "tiny"}, {})
    with pytest.raises(RunMissing, match="was deleted"):
        control.change(run, None, state="running")
    deletion.delete(settings)

    assert "run" not in set(storage.folders())
    assert queued(connect(settings), "tiny") == 2  # dropped by the worker that takes them


def test_a_node_joins_with_one_command_and_the_settings_of_the_run(
    settings: Settings,
    run: Run,
    make_prompts: MakePrompts,
    until: Until,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings.queue.url is not None
    password = urlsplit(settings.queue.url.get_secret_value()).password
    monkeypatch.setenv("DRAFTFLEET_QUEUE__PASSWORD", str(password))  # the address comes from the run
    fleet.describe(run, changed(settings, claims__ttl_s=33.0))
    names = enqueue(settings, run, make_prompts(16))
    log = tmp_path / "join.log"
    with FakeServer(model="tiny") as server:
        argv = [sys.executable, "-m", "draftfleet", "join", settings.storage.url, "--run", "run"]
        child = children.spawn([*argv, "--servers", server.url], log=log)
        try:
            until(lambda: run.done() == names, what="all batches done")
        finally:
            code = children.stop(child, grace_s=30)

    assert code == 0
    assert "from run run: claims.ttl_s = 33.0" in log.read_text()
    assert "from run run: target.model = tiny" in log.read_text()


def test_two_orders_at_once_lose_nothing(settings: Settings, run: Run) -> None:
    def order(values: dict[str, Any]) -> None:
        for _ in range(20):
            control.change(run, connect(settings), **values)

    threads = [
        threading.Thread(target=order, args=[values])
        for values in ({"priority": "high"}, {"token_budget": 7}, {"state": "paused", "reason": "why"})
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = control.read(run)
    assert (found.priority, found.token_budget, found.state, found.reason) == ("high", 7, "paused", "why")
