"""Conversations in the real pool, against scripted servers: whose turn it is, where, and what a fault costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from draftfleet.errors import BadRequest, DraftfleetError, ServerError, Transient
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Sampling, Worker
from workers.batch import Batch, Content, Row
from workers.client import Client
from workers.concurrency import Concurrency
from workers.partials import Partials
from workers.pool import Pool
from workers.servers import Server, Servers
from workers.tally import Tally

MakeSample = Callable[..., Sample]
Asked = list[tuple[str, int, str]]
"""Row, turn, and server of each request."""

NAME = "train-000000"


class Ready(Servers):
    def __init__(self, *servers: Server) -> None:
        super().__init__(Client.__new__(Client), Worker(), "tiny")
        self.all = {server.url: server for server in servers}

    async def confirm(self, server: Server) -> bool:
        return True


def a_server(run: Run, url: str = "http://a", limit: int = 4) -> Server:
    return Server(url, Concurrency(pinned=limit), state="ready", cleared={run.run_id})


def a_conversation(name: str, turns: int = 3) -> Prompt:
    ask = {"role": "user", "content": name}
    said = {"role": "assistant", "content": "source"}
    return Prompt(name, "train", [ask, *[one for _ in range(turns - 1) for one in (said, ask)]])


def a_batch(run: Run, prompts: list[Prompt], earlier: dict[str, Sample] | None = None) -> Batch:
    content = Content("tiny", Sampling(), every_turn=True)
    batch = Batch(NAME, run, content, claims=None, token="t", attempt=1, task_id="id")  # type: ignore[arg-type]
    batch.open(prompts, earlier or {})
    return batch


class Scene:
    """A pool over servers that answer as `fault` lets them."""

    def __init__(self, run: Run, make_sample: MakeSample, *servers: Server, max_tries: int = 3) -> None:
        self.asked: Asked = []
        self.tally = Tally()
        self.fault: Callable[[Row, Server], Awaitable[None]] | None = None
        self._make_sample = make_sample
        ready = Ready(*servers)
        self.pool = Pool(
            ready, self._ask, self._refuse, lambda *_: None, self._fatal, max_tries=max_tries, tally=self.tally
        )
        ready.on_change = self.pool.fill

    def submit(self, batch: Batch) -> None:
        self.pool.submit(
            batch, [Row(batch, prompt) for prompt in batch.prompts if prompt.row_key not in batch.finished]
        )

    async def run_out(self, batch: Batch) -> list[Sample]:
        self.submit(batch)
        async with asyncio.timeout(20):
            while not batch.is_complete:  # noqa: ASYNC110  it has no event
                await asyncio.sleep(0.002)
        return batch.samples()

    def value(self, name: str, **labels: str) -> float:
        registry = CollectorRegistry()
        registry.register(self.tally)
        return registry.get_sample_value(f"draftfleet_{name}", labels) or 0.0

    async def _ask(self, row: Row, server: Server) -> Sample:
        self.asked.append((row.prompt.prompt_id, len(row.asked.turns), server.url))
        await asyncio.sleep(0.001)
        if self.fault:
            await self.fault(row, server)
        sample = self._make_sample(row.asked, content=f"T{len(row.asked.turns) + 1}", server=server.url)
        return replace(sample, row_key=row.prompt.row_key, turns=row.asked.turns)

    def _refuse(self, row: Row, server: str, fault: ServerError) -> Sample:
        sample = self._make_sample(row.asked, outcome="failed", error=str(fault), token_ids=[], ids_source="none")
        return replace(sample, row_key=row.prompt.row_key, turns=row.asked.turns)

    def _fatal(self, error: DraftfleetError) -> None:
        raise AssertionError(error)


def test_a_conversation_goes_on_at_once_before_rows_that_wait_and_where_its_beginning_is_cached(
    run: Run, make_sample: MakeSample
) -> None:
    async def scenario() -> None:
        one, other = a_server(run, "http://a", 1), a_server(run, "http://b", 1)
        scene = Scene(run, make_sample, one, other)

        samples = await scene.run_out(a_batch(run, [a_conversation(name) for name in "abcdef"]))

        assert [(sample.outcome, len(sample.turns), sample.content) for sample in samples] == [("ok", 2, "T3")] * 6
        by_server = {
            url: [(row, turn) for row, turn, at in scene.asked if at == url] for url in ("http://a", "http://b")
        }
        for asked in by_server.values():
            assert [turn for _, turn in asked] == [0, 1, 2] * (len(asked) // 3)
            assert all(len({row for row, _ in asked[start : start + 3]}) == 1 for start in range(0, len(asked), 3))
        assert (one.in_flight, other.in_flight) == (0, 0)
        assert scene.value("turns_total", server="http://a") + scene.value("turns_total", server="http://b") == 12
        rows = [scene.value("rows_total", server=url, outcome="ok", kind="") for url in by_server]
        assert sum(rows) == 6

    asyncio.run(scenario())


def test_a_turn_that_broke_off_is_asked_again_and_none_before_it_and_its_tries_are_its_own(
    run: Run, make_sample: MakeSample
) -> None:
    async def scenario() -> None:
        scene = Scene(run, make_sample, a_server(run), max_tries=2)

        async def once_a_turn(row: Row, server: Server) -> None:
            if sum(turn == len(row.asked.turns) for _, turn, _ in scene.asked) == 1:
                raise Transient("reset")

        scene.fault = once_a_turn

        [sample] = await scene.run_out(a_batch(run, [a_conversation("a")]))

        assert [turn for _, turn, _ in scene.asked] == [0, 0, 1, 1, 2, 2]
        assert (sample.outcome, len(sample.turns)) == ("ok", 2)

    asyncio.run(scenario())


def test_a_turn_that_is_refused_fails_the_conversation_which_keeps_its_finished_turns(
    run: Run, make_sample: MakeSample
) -> None:
    async def scenario() -> None:
        scene = Scene(run, make_sample, a_server(run))

        async def at_the_second(row: Row, server: Server) -> None:
            if row.asked.turns and row.prompt.prompt_id == "a":
                raise BadRequest("too long")

        scene.fault = at_the_second

        failed, fine = await scene.run_out(a_batch(run, [a_conversation("a"), a_conversation("b")]))

        assert (failed.outcome, len(failed.turns)) == ("failed", 1)
        assert failed.ended == "the target gave no answer at turn 2 of 3"
        assert (fine.outcome, len(fine.turns), fine.ended) == ("ok", 2, None)
        assert scene.value("conversations_ended_total", reason="the target gave no answer") == 1

    asyncio.run(scenario())


def test_the_next_holder_goes_on_at_the_turn_after_those_that_were_saved(run: Run, make_sample: MakeSample) -> None:
    async def scenario() -> None:
        prompts = [a_conversation("a"), a_conversation("b")]
        first = Scene(run, make_sample, a_server(run, limit=1))
        hung = asyncio.Event()

        async def hang_at_the_last(row: Row, server: Server) -> None:
            if len(row.asked.turns) == 2:
                hung.set()
                await asyncio.sleep(3600)

        first.fault = hang_at_the_last
        batch = a_batch(run, prompts)
        first.submit(batch)
        await asyncio.wait_for(hung.wait(), 20)
        Partials(run, "first").write(batch.unsaved())
        await first.pool.drain(0, asyncio.Event())

        keys = {prompt.row_key for prompt in prompts}
        earlier = Partials(run, "second").earlier(NAME, keys)
        second = Scene(run, make_sample, a_server(run))
        samples = await second.run_out(a_batch(run, prompts, earlier))

        assert sorted((row, turn) for row, turn, _ in second.asked) == [("a", 2), ("b", 0), ("b", 1), ("b", 2)]
        assert [(sample.outcome, len(sample.turns)) for sample in samples] == [("ok", 2)] * 2

    asyncio.run(scenario())


def test_of_what_was_saved_of_a_conversation_the_most_counts(run: Run, make_sample: MakeSample) -> None:
    async def scenario() -> None:
        prompt = a_conversation("a")
        batch = a_batch(run, [prompt])
        partials = Partials(run, "first")
        row = Row(batch, prompt)
        for _ in range(2):
            batch.finish(row.answered(replace(make_sample(row.asked), row_key=prompt.row_key, turns=row.asked.turns)))
            partials.write(unsaved := batch.unsaved())
            batch.saved(unsaved)
            assert batch.unsaved() == []

        found = Partials(run, "second").earlier(NAME, {prompt.row_key})

        assert [len(sample.turns) for sample in found.values()] == [2]
        assert batch.holding.saved_rows == 2

    asyncio.run(scenario())


def test_progress_that_comes_while_a_partial_is_written_is_not_taken_for_saved(
    run: Run, make_sample: MakeSample
) -> None:
    prompt = a_conversation("a")
    batch = a_batch(run, [prompt])
    row = Row(batch, prompt)

    def answer() -> None:
        batch.finish(row.answered(replace(make_sample(row.asked), row_key=prompt.row_key, turns=row.asked.turns)))

    answer()
    written = batch.unsaved()
    answer()
    batch.saved(written)

    assert [len(sample.turns) for sample in batch.unsaved()] == [2]


@pytest.mark.parametrize("every_turn", [False, True])
def test_a_conversation_of_a_run_that_asks_the_last_turn_is_asked_as_it_is(
    run: Run, make_sample: MakeSample, every_turn: bool
) -> None:
    prompt = a_conversation("a")
    batch = replace(a_batch(run, []), content=Content("tiny", Sampling(), every_turn=every_turn))

    row = Row(batch, prompt)

    assert len(row.asked.messages) == (1 if every_turn else 5)
