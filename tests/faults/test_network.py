"""The network between a worker and Redis: cut, or a black hole; shorter and longer than a claim; at work and idle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from draftfleet.claims import Claims
from draftfleet.queue import connect, make_app, publish, queued
from draftfleet.reconcile import Reconciler
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.checks import assert_complete, num_asked_again
from draftfleet.testing.proxy import Proxy
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]

SLOTS = 2
CANARY = 1


def behind(proxy: Proxy, settings: Settings) -> Settings:
    return changed(settings, queue__url=SecretStr(proxy.url))


def num_attempts(settings: Settings, run: Run) -> int:
    """Batches with attempts that count against them."""
    return connect(settings).hlen(f"draftfleet:{run.run_id}:attempts")


def test_connections_that_are_killed_five_times_cost_no_row(
    quick: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(800)
    redis = connect(quick)
    with FakeServer(model="tiny", latency_s=0.05) as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=4)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            for _ in range(5):
                # More than a worker holds: some were taken after the last kill, over a new connection.
                done = len(run.done())
                until(lambda done=done: len(run.done()) > done + 3, what="more batches")
                assert redis.client_kill_filter(_type="normal", skipme=True) > 0
            server.change(latency_s=0)
            until(lambda: run.done() == names, what="all batches done")
        again = num_asked_again(prompts, [server], [worker])

    assert again == 0
    assert num_attempts(settings, run) == 0
    assert_complete(run, prompts)


@pytest.mark.parametrize("fault", ["cut", "hold"])
def test_a_network_that_is_away_for_less_than_a_claim_costs_nothing(
    fault: str, quick: Settings, run: Run, proxy: Proxy, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(80)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=SLOTS, claims__ttl_s=60)
        server.fault("stall", after=CANARY + 20, times=1)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(behind(proxy, settings), tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["in_flight"] == SLOTS, what="rows in flight")
            done = len(run.done())
            getattr(proxy, fault)()
            server.change(frozen=False)
            until(lambda: len(run.done()) > done, what="a batch committed without Redis")
            proxy.heal()
            until(lambda: run.done() == names, what="all batches done")
        again = num_asked_again(prompts, [server], [worker])

    assert again == 0
    assert num_attempts(settings, run) == 0
    assert_complete(run, prompts)


def test_a_network_that_is_away_for_longer_than_a_claim_counts_no_attempt_while_nobody_took_the_batch(
    quick: Settings,
    run: Run,
    storage: FileStorage,
    proxy: Proxy,
    make_prompts: MakePrompts,
    until: Until,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(8)
    redis = connect(quick)
    reconciler = Reconciler(make_app(quick), redis, storage, quick.claims)
    reconciler.discover()
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=SLOTS)
        server.fault("stall", after=CANARY, times=1)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(behind(proxy, settings), tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["in_flight"] == SLOTS, what="rows in flight")
            proxy.hold()
            until(lambda: reconciler.sweep() == 1, what="the lapse of the claim")
            assert num_attempts(settings, run) == 1

            proxy.heal()
            until(lambda: worker.said("claim retaken"), what="the claim to be renewed")
            until(lambda: num_attempts(settings, run) == 0, what="the attempt to be forgiven")
            until(lambda: queued(redis, "tiny") == 0, what="the second delivery to be dropped")
            assert Claims(redis, run.run_id, settings.claims, "test").held() == set(names)
            server.change(frozen=False)
            until(lambda: run.done() == names, what="the batch")
        again = num_asked_again(prompts, [server], [worker])

    assert again == 0
    assert worker.said("second delivery dropped")
    assert_complete(run, prompts)


def test_a_message_that_vanishes_on_its_way_to_an_idle_worker_is_published_again(
    quick: Settings, run: Run, proxy: Proxy, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(quick)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url])
        prompts = make_prompts(8)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(behind(proxy, settings), tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="a first batch, so that it waits for messages")

            def is_swallowed() -> bool:
                """Redis hands it over within the second that the worker asks it to wait for one, or not at all."""
                proxy.heal()
                until(lambda: run.done() == names, what="all batches so far")
                until(lambda: any(one["cmd"] == "brpop" for one in redis.client_list()), what="a worker that waits")
                proxy.hold()
                more = make_prompts(8, start=len(prompts))
                prompts.extend(more)
                names.extend(enqueue(settings, run, more))
                return queued(redis, "tiny") == 0

            until(is_swallowed, what="a message handed over into the black hole")
            proxy.cut()
            assert queued(redis, "tiny") == 0
            proxy.heal()
            until(lambda: run.done() == names, what="all batches done")
        again = num_asked_again(prompts, [server], [worker])

    assert worker.said("missing batches published again")
    assert again == 0
    assert num_attempts(settings, run) == 0
    assert_complete(run, prompts)


def test_an_idle_worker_that_was_cut_off_for_longer_than_a_claim_works_on(
    quick: Settings, run: Run, proxy: Proxy, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(16)
    redis = connect(quick)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url])
        names = enqueue(settings, run, prompts[:8])
        with WorkerProcess(behind(proxy, settings), tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="a first batch")
            proxy.hold()
            witness = Claims(redis, run.run_id, settings.claims, "witness")
            witness.take("witness")
            until(witness.sweep, what="as long as a claim lives")

            names += enqueue(settings, run, prompts[8:])
            publish(make_app(settings), redis, run, "tiny", names)  # and once more, the first as well
            proxy.heal()
            until(lambda: run.done() == names, what="all batches done")
            until(lambda: queued(redis, "tiny") == 0, what="an empty queue")
        again = num_asked_again(prompts, [server], [worker])

    assert again == 0
    assert_complete(run, prompts)
