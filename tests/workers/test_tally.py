"""What is counted as wasted, lost and asked again, where the real pool and holdings call the tally."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from draftfleet.errors import DraftfleetError, ServerError, Transient
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Sampling, Worker
from workers.batch import Batch, Content, Row
from workers.client import Client
from workers.concurrency import Concurrency
from workers.guard import Guard
from workers.holdings import Holdings
from workers.partials import Partials
from workers.pool import Pool
from workers.servers import Server, Servers
from workers.tally import Tally

A = "http://a"


class Ready(Servers):
    def __init__(self, server: Server) -> None:
        super().__init__(Client.__new__(Client), Worker(), "tiny")
        self.all = {server.url: server}

    async def confirm(self, server: Server) -> bool:
        return True


def value(tally: Tally, name: str, **labels: str) -> float:
    registry = CollectorRegistry()
    registry.register(tally)
    return registry.get_sample_value(f"draftfleet_{name}", labels) or 0.0


def a_batch(run: Run, prompts: list[Prompt], max_tokens: int = 8192) -> Batch:
    content = Content("tiny", Sampling(max_tokens=max_tokens))
    batch = Batch("train-000000", run, content, claims=None, token="t", attempt=1, task_id="id")  # type: ignore[arg-type]
    batch.open(prompts, {})
    return batch


def a_pool(tally: Tally, run: Run, ask: Callable[..., object]) -> Pool:
    def refuse(row: Row, server: str, fault: ServerError) -> Sample:
        raise AssertionError

    def fatal(error: DraftfleetError) -> None:
        raise AssertionError(error)

    server = Server(A, Concurrency(pinned=8), state="ready", cleared={run.run_id}, seconds_per_token=0.001)
    return Pool(Ready(server), ask, refuse, lambda *_: None, fatal, max_tries=9, tally=tally)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "cause"), [("lost", "lost claim"), ("given back", "drained"), ("draining", "drained")]
)
def test_a_request_that_is_cut_off_wastes_what_its_server_had_generated_by_then(
    run: Run, make_prompts: Callable[..., list[Prompt]], reason: str, cause: str
) -> None:
    tally = Tally()

    async def scenario() -> None:
        async def ask(row: Row, server: Server) -> Sample:
            await asyncio.sleep(3600)
            raise AssertionError

        pool = a_pool(tally, run, ask)
        batch = a_batch(run, make_prompts(3), max_tokens=64)
        rows = [Row(batch, prompt) for prompt in batch.prompts]
        pool.submit(batch, rows)
        await asyncio.sleep(0)
        for row, seconds in zip(rows, (0.0, 0.030, 500.0), strict=True):
            row.since -= seconds
        batch.stop(reason)
        await pool.drop(batch)

    asyncio.run(scenario())

    wasted = value(tally, "wasted_tokens_total", server=A, cause=cause)
    assert 30 + 64 <= wasted <= 3 * 64, "never more than the run allows an answer"
    assert value(tally, "queue_wait_seconds_count") == 3


def test_an_answer_that_broke_off_is_a_fault_and_a_refusal_wastes_nothing(
    run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]
) -> None:
    tally = Tally()

    async def scenario() -> None:
        tries = 0

        async def ask(row: Row, server: Server) -> Sample:
            nonlocal tries
            tries += 1
            if tries == 1:
                row.since -= 0.5
                raise Transient("it broke")
            return make_sample(row.prompt, completion_tokens=7, seconds=0.2)

        pool = a_pool(tally, run, ask)
        batch = a_batch(run, make_prompts(1))
        pool.submit(batch, [Row(batch, batch.prompts[0])])
        async with asyncio.timeout(20):
            while not batch.is_complete:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(scenario())

    assert value(tally, "faults_total", server=A, kind="transient") == 1
    assert value(tally, "wasted_tokens_total", server=A, cause="retried") >= 500
    assert value(tally, "rows_total", server=A, outcome="ok", kind="") == 1
    assert value(tally, "tokens_total", server=A) == 7
    assert value(tally, "queue_wait_seconds_count") == 2
    assert value(tally, "queue_wait_seconds_sum") < 0.4, "a back-off is no wait for a slot"


def test_checkpoints_are_counted_with_their_rows(
    run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]
) -> None:
    tally = Tally()
    holdings = Holdings(Guard(lambda: None), lambda _: None, tally)
    batch = a_batch(run, make_prompts(3))
    holdings.hold(batch, Partials(run, "p"))

    holdings.checkpoint()
    for prompt in batch.prompts[:2]:
        batch.finish(make_sample(prompt))
    holdings.checkpoint()
    holdings.checkpoint()

    assert value(tally, "checkpoints_total") == 1
    assert value(tally, "checkpoint_rows_total") == 2
    assert value(tally, "last_checkpoint_timestamp_seconds") > 1.7e9


def test_a_server_that_did_nothing_yet_stands_at_zero() -> None:
    """So that the first failed row is a step that a rate can see."""
    tally = Tally()
    tally.know(A)
    registry = CollectorRegistry()
    registry.register(tally)

    assert registry.get_sample_value("draftfleet_rows_total", {"server": A, "outcome": "failed", "kind": ""}) == 0
    assert registry.get_sample_value("draftfleet_wasted_tokens_total", {"server": A, "cause": "stalled"}) == 0
