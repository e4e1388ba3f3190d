"""A worker that dies, is told to stop, freezes; a storage that is full; a Redis that goes away. Nothing may be lost."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.embedded import Embedded
from draftfleet.queue import connect, make_app, publish, queued
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import collect, warnings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.checks import assert_complete, num_asked_again, num_kept
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]

SHORT = {
    "claims__ttl_s": 1.5,
    "claims__renew_s": 0.3,
    "claims__sweep_s": 0.3,
    "claims__reconcile_s": 1,
    "claims__grace_s": 1,
    "worker__checkpoint_interval_s": 0.3,
    "worker__probe_interval_s": 0.2,
}

STALL = {"kind": "stall", "after": 20, "times": 1}
"""One canary and 19 rows are answered, then the server stands still until `frozen` is unset: what has to happen in
mid-run happens then, however slow the machine."""

WITHOUT_THE_RIGHTS_OF_ROOT = (
    sys.executable,
    "-c",
    # A read-only folder stops everybody but a superuser with CAP_DAC_OVERRIDE (1).
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])",
)


def test_a_batch_that_is_delivered_twice_is_done_once(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(8)
    with FakeServer(model="tiny", frozen=True) as one, FakeServer(model="tiny", frozen=True) as other:
        settings = changed(settings, worker__concurrency=1, **SHORT)
        app, redis = make_app(settings), connect(settings)
        workers = [
            WorkerProcess(changed(settings, worker__servers=[server.url]), tmp_path / f"{number}.log")
            for number, server in enumerate((one, other))
        ]
        with workers[0], workers[1]:
            until(lambda: all(worker.said("worker started") for worker in workers), what="both workers")
            names = enqueue(settings, run, prompts)
            [first] = until(lambda: [worker for worker in workers if worker.said("batch taken")], what="a holder")
            [second] = [worker for worker in workers if worker is not first]

            def is_refused() -> list[str]:
                publish(app, redis, run, "tiny", names)
                return second.said("second delivery dropped")

            [said, *_] = until(is_refused, what="the other to be given the batch as well")
            for server in (one, other):
                server.change(frozen=False)
            until(lambda: run.done() == names, what="the batch")
            until(lambda: queued(redis, "tiny") == 0, what="an empty queue")
        again = num_asked_again(prompts, [one, other], workers)

    assert str(first.pid) in said.partition("holder=")[2]
    assert again == 0
    assert sum(len(worker.said("batch done")) for worker in workers) == 1
    assert_complete(run, prompts)


def test_after_kill_9_another_worker_redoes_only_what_was_in_flight_or_not_yet_saved(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(256)
    slots, latency_s, interval_s = 4, 0.1, SHORT["worker__checkpoint_interval_s"]
    with FakeServer(model="tiny", latency_s=latency_s) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=slots, **SHORT)
        names = enqueue(settings, run, prompts, batch_size=32)

        with WorkerProcess(settings, tmp_path / "first.log") as first:
            until(lambda: list(run.partials()) and server.stats()["requests"] > 16, what="rows on the way")
            first.send(signal.SIGKILL)
            first.wait()
        before, kept = server.stats()["requests"] - 1, num_kept(run)  # one canary
        server.change(latency_s=0)
        with WorkerProcess(settings, tmp_path / "second.log") as second:
            until(lambda: run.done() == names, what="all batches done")
        again = num_asked_again(prompts, [server], [first, second])

    assert 16 <= before < len(prompts)
    assert again == before - kept
    # In flight: one per slot. Unsaved: what the slots finish in an interval, and in the time a write may take.
    assert again <= slots + slots * (interval_s + 1) / latency_s
    assert_complete(run, prompts)


def test_sigterm_drains_and_the_next_worker_asks_no_row_again(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(64)
    redis = connect(settings)
    with FakeServer(model="tiny", faults=[STALL]) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4)
        names = enqueue(settings, run, prompts, batch_size=32)

        with WorkerProcess(settings, tmp_path / "first.log") as first:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            first.send(signal.SIGTERM)
            until(lambda: first.said("worker draining"), what="the drain")
            server.change(frozen=False)
            code = first.wait()
        kept = num_kept(run)
        held = Claims(redis, run.run_id, settings.claims, "test").held()
        waiting = queued(redis, "tiny")
        unacknowledged = redis.hlen("unacked")
        with WorkerProcess(settings, tmp_path / "second.log"):
            until(lambda: run.done() == names, what="all batches done")
        requests = server.stats()["requests"]

    assert code == 0
    assert held == set()
    assert waiting == len(names)
    assert unacknowledged == 0
    assert redis.hlen(f"draftfleet:{run.run_id}:attempts") == 0
    assert kept == 19 + 4
    assert requests == len(prompts) + 2  # one canary per worker
    assert_complete(run, prompts)


def test_a_second_signal_does_not_wait_for_rows_in_flight_and_still_releases(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(settings)
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url], worker__drain_s=600)
        server.fault("hang", after=2)
        names = enqueue(settings, run, make_prompts(16))
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["requests"] > 8, what="rows in flight")

            worker.send(signal.SIGINT)
            until(lambda: worker.said("worker draining"), what="the drain")
            worker.send(signal.SIGINT)
            code = worker.wait()

    assert code == 0
    assert Claims(redis, run.run_id, settings.claims, "test").held() == set()
    assert queued(redis, "tiny") == len(names)


def test_a_storage_that_cannot_be_written_pauses_the_node_until_it_can(
    settings: Settings, run: Run, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(120)
    redis = connect(settings)
    folder = storage.root / run.name

    def shown() -> list[str]:
        return warnings(collect(settings, Accountant(run)))

    with FakeServer(model="tiny", faults=[STALL]) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4, **SHORT)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log", wrapper=WITHOUT_THE_RIGHTS_OF_ROOT) as worker:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            until(lambda: run.done() and list(run.partials()), what="a batch and rows on the storage")
            for name in ("samples", "partial"):
                (folder / name).chmod(0o555)
            server.change(frozen=False, latency_s=0.1)
            until(lambda: worker.said("worker paused"), what="the pause")
            until(lambda: "is paused: could not write" in " ".join(shown()), what="the reason in `draftfleet status`")
            until(lambda: server.stats()["in_flight"] == 0, what="no more requests")
            asked, waiting = server.stats()["requests"], queued(redis, "tiny")
            # Longer than a claim lives: a paused node keeps its claims, and nothing is acknowledged away.
            until(lambda: _renewed(redis, run, times=8), what="eight renewals")
            still_asked, still_waiting = server.stats()["requests"], queued(redis, "tiny")
            lapses = redis.hlen(f"draftfleet:{run.run_id}:attempts")

            for name in ("samples", "partial"):
                (folder / name).chmod(0o755)
            until(lambda: run.done() == names, what="all batches done")
        requests = server.stats()["requests"]

    assert 0 < waiting < len(names)
    assert (still_asked, still_waiting, lapses) == (asked, waiting, 0)
    assert worker.said("storage reached again")
    assert requests == len(prompts) + 1
    assert_complete(run, prompts)


def test_a_storage_that_is_unmounted_pauses_the_node_and_costs_no_message_and_no_row(
    settings: Settings, run: Run, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(120)
    redis = connect(settings)
    with FakeServer(model="tiny", faults=[STALL]) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4, **SHORT)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            storage.root.rename(tmp_path / "unmounted")
            storage.root.mkdir()
            server.change(frozen=False, latency_s=0.1)
            until(lambda: worker.said("worker paused"), what="the pause")
            until(lambda: server.stats()["in_flight"] == 0, what="no more requests")
            until(lambda: _renewed(redis, run, times=4), what="four renewals")
            waiting = queued(redis, "tiny")
            written = [path for path in storage.root.rglob("*") if path.is_file()]

            shutil.rmtree(storage.root)
            (tmp_path / "unmounted").rename(storage.root)
            until(lambda: run.done() == names, what="all batches done")
        requests = server.stats()["requests"]

    assert waiting > 0
    assert written == []
    assert not worker.said("batch has no prompts")
    assert requests == len(prompts) + 1
    assert_complete(run, prompts)


def test_a_redis_that_is_killed_and_comes_back_costs_nothing(
    settings: Settings, run: Run, redis_server: Embedded, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(80)
    with FakeServer(model="tiny", faults=[STALL]) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4, **SHORT)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            done = len(run.done())
            assert redis_server.process is not None
            redis_server.process.kill()
            redis_server.process.wait()
            server.change(frozen=False)
            until(lambda: len(run.done()) > done, what="a batch committed without Redis")
            redis_server.start()
            until(lambda: run.done() == names, what="all batches done")
            worker.send(signal.SIGTERM)
            code = worker.wait()
        requests = server.stats()["requests"]

    assert code == 0
    assert not worker.said("Traceback")
    assert requests == len(prompts) + 1
    assert_complete(run, prompts)


def test_a_redis_that_forgot_everything_costs_nothing(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(80)
    with FakeServer(model="tiny", faults=[STALL]) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4, **SHORT)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            connect(settings).flushall()
            until(lambda: worker.said("claim retaken"), what="the claims to be taken again")
            server.change(frozen=False)
            until(lambda: run.done() == names, what="all batches done")
            requests = server.stats()["requests"]

    assert worker.said("missing batches published again")
    assert requests == len(prompts) + 1
    assert_complete(run, prompts)


def test_batches_that_only_the_storage_knows_are_found_though_a_reconciler_died_holding_its_lock(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(24)
    redis = connect(settings)
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url], **SHORT)
        names = enqueue(settings, run, prompts)
        redis.flushall()
        lock = redis.lock("draftfleet:reconciling", timeout=60)
        lock.acquire()
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: worker.said("worker started"), what="the worker")
            redis.pexpire("draftfleet:reconciling", 1)  # its time is up
            until(lambda: run.done() == names, what="all batches done")
        again = num_asked_again(prompts, [server], [worker])

    assert worker.said("missing batches published again")
    assert again == 0
    assert_complete(run, prompts)


def test_a_worker_that_is_started_before_redis_waits_for_it_and_says_so(
    settings: Settings, run: Run, redis_server: Embedded, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url])
        names = enqueue(settings, run, make_prompts(8))
        redis_server.stop()

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: worker.said("waiting for redis"), what="the wait")
            redis_server.start()
            until(lambda: run.done() == names, what="the batch")


def test_a_drain_ends_though_redis_is_away(
    settings: Settings, run: Run, redis_server: Embedded, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url], worker__drain_s=0, **SHORT)
        server.fault("hang", after=4)
        enqueue(settings, run, make_prompts(8))
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: list(run.partials()), what="finished rows")
            redis_server.stop()

            worker.send(signal.SIGTERM)
            code = worker.wait(40)

    assert code == 0
    assert worker.said("claim not released")
    assert not worker.said("Traceback")


def _renewed(redis: Any, run: Run, *, times: int, seen: dict[str, set[str]] = {}) -> bool:  # noqa: B006
    """Whether the claims of this run were seen in that many forms: each renewal moves their expiry."""
    forms = seen.setdefault(run.run_id, set())
    forms.add(str(sorted(redis.hgetall(f"draftfleet:{run.run_id}:claims").items())))
    return len(forms) > times
