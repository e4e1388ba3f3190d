"""What becomes of a batch whose holder dies, freezes or is cut off, at each point where that matters."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.names import parts_of
from draftfleet.queue import connect, make_app, publish, queued
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.checks import assert_complete, num_asked_again
from draftfleet.testing.proxy import Proxy
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]

SLOTS = 3
CANARY = 1


def asked(server: FakeServer) -> int:
    return server.stats(rows=False)["requests"]


def saved_rows(run: Run) -> int:
    return sum(len(run.read_partial(name)) for name in run.partials())


def work_until(worker: WorkerProcess, server: FakeServer, run: Run, until: Until, *, rows: int, saved: int) -> None:
    """Let it finish so many rows, of which the storage then has `saved` in all, and hold its slots full of others."""
    before = asked(server)
    server.fault("hang", after=CANARY + rows)
    with worker:
        until(lambda: saved_rows(run) == saved, what=f"{saved} saved rows")
        until(lambda: asked(server) == before + CANARY + rows + SLOTS, what="rows in flight")
        worker.send(signal.SIGKILL)
        worker.wait()
    server.clear()


def test_two_kills_cost_the_rows_in_flight_and_no_row_that_was_saved_by_either(
    quick: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(24)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=SLOTS)
        names = enqueue(settings, run, prompts, batch_size=24)
        workers = [WorkerProcess(settings, tmp_path / f"{number}.log") for number in range(3)]

        work_until(workers[0], server, run, until, rows=6, saved=6)
        work_until(workers[1], server, run, until, rows=5, saved=11)
        with workers[2] as last:
            until(lambda: run.done() == names, what="the batch")
            until(lambda: not list(run.partials()), what="the partials of all three to be deleted")
        again = num_asked_again(prompts, [server], workers)

    assert [line.rpartition("found=")[2].split()[0] for line in last.said("batch taken")] == ["11"]
    assert again == 2 * SLOTS
    assert_complete(run, prompts)


def test_a_torn_partial_costs_its_torn_row_alone(
    quick: Settings, run: Run, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(16)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=SLOTS)
        names = enqueue(settings, run, prompts, batch_size=16)
        workers = [WorkerProcess(settings, tmp_path / f"{number}.log") for number in range(2)]
        work_until(workers[0], server, run, until, rows=6, saved=6)

        torn = max((storage.root / run.name / "partial").glob("*.jsonl"))
        torn.write_bytes(torn.read_bytes()[:-40])
        with workers[1]:
            until(lambda: run.done() == names, what="the batch")
        again = num_asked_again(prompts, [server], workers)

    assert again == SLOTS + 1
    assert_complete(run, prompts)


def test_a_holder_that_dies_between_shard_and_release_costs_nothing(
    quick: Settings, run: Run, proxy: Proxy, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(8)
    redis = connect(quick)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=SLOTS)
        names = enqueue(settings, run, prompts)
        first = WorkerProcess(changed(settings, queue__url=SecretStr(proxy.url)), tmp_path / "first.log")
        server.fault("stall", after=CANARY, times=1)
        with first:
            until(lambda: server.stats()["in_flight"] == SLOTS, what="rows in flight")
            proxy.hold()
            server.change(frozen=False)
            until(lambda: run.done() == names, what="the shard")
            first.send(signal.SIGKILL)
            first.wait()
        claims = Claims(redis, run.run_id, settings.claims, "test")
        assert claims.held() == set(names)

        with WorkerProcess(settings, tmp_path / "second.log") as second:
            until(lambda: not claims.held(), what="the claim to lapse")
            publish(make_app(settings), redis, run, "tiny", names)
            until(lambda: second.said("batch skipped"), what="its message to be seen to")
            until(lambda: queued(redis, "tiny") == 0, what="an empty queue")
        again = num_asked_again(prompts, [server], [first, second])

    assert again == 0
    assert not second.said("batch taken")
    assert_complete(run, prompts)


@pytest.mark.parametrize("fault", ["stopped", "cut", "hold"])
def test_a_holder_away_for_longer_than_its_claim_costs_what_both_held(
    fault: str, quick: Settings, run: Run, proxy: Proxy, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(16)
    with FakeServer(model="tiny") as one, FakeServer(model="tiny", frozen=True) as other:
        settings = changed(quick, worker__concurrency=SLOTS)
        one.fault("hang", after=CANARY + 5)
        names = enqueue(settings, run, prompts, batch_size=16)
        behind = changed(settings, worker__servers=[one.url], queue__url=SecretStr(proxy.url))
        first = WorkerProcess(behind, tmp_path / "first.log")
        second = WorkerProcess(changed(settings, worker__servers=[other.url]), tmp_path / "second.log")

        with first:
            until(lambda: saved_rows(run) == 5, what="saved rows")
            until(lambda: asked(one) == CANARY + 5 + SLOTS, what="rows in flight")
            first.send(signal.SIGSTOP) if fault == "stopped" else getattr(proxy, fault)()
            with second:
                until(lambda: second.said("batch taken"), what="the second holder")
                first.send(signal.SIGCONT) if fault == "stopped" else proxy.heal()
                until(lambda: first.said("batch left to its new holder"), what="the first to let go")
                other.change(frozen=False)
                until(lambda: run.done() == names, what="the batch")
        again = num_asked_again(prompts, [one, other], [first, second])

    assert again == SLOTS
    assert second.said("found=5")
    assert not first.said("batch done")
    assert_complete(run, prompts)


def test_a_claim_that_lapses_while_its_holder_is_paused_goes_to_another_and_comes_to_one_shard(
    quick: Settings,
    run: Run,
    proxy: Proxy,
    faulty_storage: Any,
    make_prompts: MakePrompts,
    until: Until,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(24)
    with FakeServer(model="tiny", latency_s=0.3) as one, FakeServer(model="tiny", frozen=True) as other:
        settings = changed(quick, worker__concurrency=SLOTS)
        names = enqueue(settings, run, prompts, batch_size=24)
        behind = changed(settings, worker__servers=[one.url], queue__url=SecretStr(proxy.url))
        first = WorkerProcess(behind, tmp_path / "first.log", wrapper=faulty_storage.wrapper)
        second = WorkerProcess(changed(settings, worker__servers=[other.url]), tmp_path / "second.log")

        with first:
            until(lambda: one.stats()["in_flight"] == SLOTS, what="rows in flight")
            faulty_storage.fail("os.rename")
            until(lambda: first.said("worker paused"), what="the pause")
            proxy.hold()
            with second:
                until(lambda: second.said("batch taken"), what="the second holder")
                proxy.heal()
                until(lambda: first.said("claim lost"), what="the first to be told")
                begun, saved = asked(one) - CANARY, saved_rows(run)
                faulty_storage.mend()
                until(lambda: first.said("batch left to its new holder"), what="the first to let go")
                other.change(frozen=False)
                until(lambda: run.done() == names, what="the batch")
        again = num_asked_again(prompts, [one, other], [first, second])

    assert second.said(f"found={saved}")
    assert again == begun - saved
    assert_complete(run, prompts)


def test_a_row_that_succeeds_after_it_was_given_up_counts_as_answered(
    quick: Settings,
    run: Run,
    make_prompts: MakePrompts,
    make_sample: Callable[..., Sample],
    until: Until,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(4)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=SLOTS)
        names = enqueue(settings, run, prompts, batch_size=4)
        run.split(names[0], 4)
        parts = parts_of(names[0], 4)
        late = parts[3]
        server.fault("hang", contains="Question 3?")
        publish(make_app(settings), connect(settings), run, "tiny", parts)
        with WorkerProcess(settings, tmp_path / "worker.log"):
            # Single rows take turns, so the others may have to wait for this one.
            until(lambda: "Question 3?" in server.stats()["rows"], what="the row to be in flight")
            run.bury(late, make_sample(prompts[3], late, outcome="failed", error="out of attempts"))
            given_up = Accountant(run).account()
            server.clear()
            until(lambda: set(run.done()) == set(parts), what="the late row")

    assert (given_up.failed, given_up.dead) == (1, 1)
    assert given_up.holds
    assert Accountant(run).account().dead == 0
    assert_complete(run, prompts)
