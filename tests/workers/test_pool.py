"""The pool against scripted servers: who gets the next row, and what becomes of a row that fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from draftfleet.errors import BadRequest, DraftfleetError, ServerError, Transient
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Sampling, Worker
from workers.batch import Batch, Content, Row
from workers.client import Client
from workers.concurrency import Concurrency
from workers.pool import Pool
from workers.servers import Server, Servers

Answer = Callable[[Row, Server], Awaitable[Sample]]


class Ready(Servers):
    """Servers that are ready without being looked at. `gone` are those that a look would not find."""

    def __init__(self, *servers: Server) -> None:
        super().__init__(Client.__new__(Client), Worker(), "tiny")
        self.all = {server.url: server for server in servers}
        self.gone: set[str] = set()

    async def confirm(self, server: Server) -> bool:
        server.refused = server.url in self.gone
        return not server.refused


def a_server(url: str, limit: int, run: Run) -> Server:
    return Server(url, Concurrency(pinned=limit), state="ready", cleared={run.run_id})


def a_batch(run: Run, prompts: list[Prompt], name: str = "train-000000") -> Batch:
    batch = Batch(name, run, Content("tiny", Sampling()), claims=None, token="t", attempt=1, task_id="id")  # type: ignore[arg-type]
    batch.open(prompts, {})
    return batch


def a_pool(servers: Servers, ask: Answer, make_sample: Callable[..., Sample], *, max_tries: int = 3) -> Pool:
    def refuse(row: Row, server: str, fault: ServerError) -> Sample:
        return make_sample(row.prompt, outcome="failed", error=str(fault))

    def fatal(error: DraftfleetError) -> None:
        raise AssertionError(error)

    pool = Pool(servers, ask, refuse, lambda server, batch, rows: None, fatal, max_tries=max_tries)
    servers.on_change = pool.fill
    return pool


async def until(condition: Callable[[], bool], deadline_s: float = 20) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110  any condition
            await asyncio.sleep(0.005)


def rows_of(batch: Batch) -> list[Row]:
    return [Row(batch, prompt) for prompt in batch.prompts]


@pytest.fixture
def prompts(make_prompts: Callable[..., list[Prompt]]) -> list[Prompt]:
    return make_prompts(30)


def test_a_limit_that_is_changed_counts_at_once_for_rows_not_yet_started(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        server = a_server("http://a", 2, run)
        gate = asyncio.Event()

        async def ask(row: Row, server: Server) -> Sample:
            await gate.wait()
            return make_sample(row.prompt)

        pool = a_pool(Ready(server), ask, make_sample)
        batch = a_batch(run, prompts)
        pool.submit(batch, rows_of(batch))
        at_first = server.in_flight

        server.concurrency.configure(0, most=512, pinned=7)
        pool.fill()
        then = server.in_flight
        server.concurrency.configure(0, most=512, pinned=3)
        gate.set()
        await until(lambda: batch.is_complete)

        assert (at_first, then) == (2, 7)

    asyncio.run(scenario())


def test_a_server_of_half_the_speed_gets_half_the_rows(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        fast, slow = a_server("http://fast", 30, run), a_server("http://slow", 30, run)
        fast.seconds_per_token, slow.seconds_per_token = 0.01, 0.02

        async def ask(row: Row, server: Server) -> Sample:
            await asyncio.sleep(3600)
            raise AssertionError

        pool = a_pool(Ready(fast, slow), ask, make_sample)
        batch = a_batch(run, prompts)
        pool.submit(batch, rows_of(batch))

        assert (fast.in_flight, slow.in_flight) == (20, 10)
        await pool.drain(0, asyncio.Event())

    asyncio.run(scenario())


def test_a_row_that_broke_off_goes_to_another_server_and_its_slot_is_free_meanwhile(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        bad, good = a_server("http://bad", 1, run), a_server("http://good", 1, run)
        asked: list[tuple[str, str]] = []

        async def ask(row: Row, server: Server) -> Sample:
            asked.append((row.prompt.row_key, server.url))
            await asyncio.sleep(0.01)
            if server is bad:
                raise Transient("reset")
            return make_sample(row.prompt)

        pool = a_pool(Ready(bad, good), ask, make_sample, max_tries=20)
        batch = a_batch(run, prompts[:6])
        pool.submit(batch, rows_of(batch))
        await until(lambda: batch.is_complete)

        assert {sample.outcome for sample in batch.samples()} == {"ok"}
        # In the back-off of the first row the bad server was given others: no slot was held.
        assert len({key for key, url in asked[:6] if url == bad.url}) >= 2

    asyncio.run(scenario())


def test_a_row_that_takes_its_servers_down_is_found_alone_and_its_neighbours_live(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        server = a_server("http://a", 8, run)
        servers = Ready(server)
        poison = prompts[4].row_key
        crashes = 0
        holders: set[asyncio.Future[None]] = set()

        async def ask(row: Row, server: Server) -> Sample:
            nonlocal crashes
            crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            holders.add(crash)
            try:
                if row.prompt.row_key == poison:
                    await asyncio.sleep(0.01)
                    crashes += 1
                    servers.gone.add(server.url)
                    for one in holders:
                        if not one.done():
                            one.set_exception(Transient("connection reset"))
                await asyncio.wait_for(crash, 0.03)
            except TimeoutError:
                return make_sample(row.prompt)
            finally:
                holders.discard(crash)
            raise AssertionError

        async def restart() -> None:
            while True:
                await asyncio.sleep(0.05)
                servers.gone.clear()

        restarts = asyncio.create_task(restart())
        pool = a_pool(servers, ask, make_sample, max_tries=1)
        batch = a_batch(run, prompts[:16])
        pool.submit(batch, rows_of(batch))
        await until(lambda: batch.is_complete)
        restarts.cancel()

        failed = [sample for sample in batch.samples() if sample.outcome == "failed"]
        assert [sample.row_key for sample in failed] == [poison]
        assert failed[0].error is not None
        assert "3 servers ended while they worked on this row" in failed[0].error
        assert crashes == 3

    asyncio.run(scenario())


class Crashing:
    """Servers that end when they are asked for `poison`, with all they hold, and come back at once."""

    def __init__(self, make_sample: Callable[..., Sample], poison: set[str], *, seen_away: bool) -> None:
        self.poison = poison
        self.crashes: list[set[str]] = []
        self.together: list[set[str]] = []
        self.servers: Ready | None = None
        self._make_sample = make_sample
        self._seen_away = seen_away
        self._holders: dict[str, dict[str, asyncio.Future[None]]] = {}

    async def ask(self, row: Row, server: Server) -> Sample:
        held = self._holders.setdefault(server.url, {})
        key = row.prompt.row_key
        crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held[key] = crash
        self.together.append(set(held))
        if key in self.poison:
            asyncio.get_running_loop().call_later(0.01, self.crash, server)
        try:
            await asyncio.wait_for(crash, 0.03)
        except TimeoutError:
            return self._make_sample(row.prompt)
        finally:
            held.pop(key, None)
        raise AssertionError

    def crash(self, server: Server) -> None:
        assert self.servers is not None
        held = self._holders[server.url]
        self.crashes.append(set(held))
        if self._seen_away:
            self.servers.gone.add(server.url)
            asyncio.get_running_loop().call_later(0.03, self.servers.gone.discard, server.url)
        for one in held.values():
            if not one.done():
                one.set_exception(Transient("connection reset", is_broken=True))


def test_all_rows_of_a_server_that_died_are_asked_one_at_a_time(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        server = a_server("http://a", 8, run)
        crashing = Crashing(make_sample, set(), seen_away=True)
        crashing.servers = Ready(server)
        pool = a_pool(crashing.servers, crashing.ask, make_sample)
        batch = a_batch(run, prompts[:12])
        pool.submit(batch, rows_of(batch))
        await until(lambda: server.in_flight == 8)
        await asyncio.sleep(0)

        crashing.crash(server)
        crashing.together.clear()
        await until(lambda: batch.is_complete)

        [suspects] = crashing.crashes
        assert {sample.outcome for sample in batch.samples()} == {"ok"}
        assert len(suspects) == 8
        assert max(len(held & suspects) for held in crashing.together) == 1

    asyncio.run(scenario())


def test_a_row_is_parked_only_when_it_was_all_that_its_server_held(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        servers = [a_server("http://a", 4, run), a_server("http://b", 4, run)]
        bad = {prompts[4].row_key, prompts[9].row_key}
        crashing = Crashing(make_sample, bad, seen_away=True)
        crashing.servers = Ready(*servers)
        pool = a_pool(crashing.servers, crashing.ask, make_sample, max_tries=1)
        batch = a_batch(run, prompts)
        pool.submit(batch, rows_of(batch))
        await until(lambda: batch.is_complete)

        failed = {sample.row_key for sample in batch.samples() if sample.outcome == "failed"}
        assert failed == bad
        assert sum(held in ({key} for key in bad) for held in crashing.crashes) >= len(bad)
        assert all(server.in_flight == 0 for server in servers)

    asyncio.run(scenario())


def test_two_reboots_park_no_row_however_they_fall(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        servers = [a_server("http://a", 4, run), a_server("http://b", 4, run)]
        crashing = Crashing(make_sample, set(), seen_away=True)
        crashing.servers = Ready(*servers)
        pool = a_pool(crashing.servers, crashing.ask, make_sample, max_tries=1)
        batch = a_batch(run, prompts[:10])
        pool.submit(batch, rows_of(batch))
        for _ in range(2):
            asked = len(crashing.together)
            await until(lambda asked=asked: len(crashing.together) > asked)
            for server in servers:
                crashing.crash(server)
        await until(lambda: batch.is_complete)

        assert {sample.outcome for sample in batch.samples()} == {"ok"}

    asyncio.run(scenario())


def test_a_server_that_is_back_before_it_is_missed_costs_the_neighbours_of_a_bad_row_nothing(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.pool.LONGEST_BACKOFF_S", 0.02)

    async def scenario() -> None:
        server = a_server("http://a", 8, run)
        crashing = Crashing(make_sample, {prompts[4].row_key}, seen_away=False)
        crashing.servers = Ready(server)
        pool = a_pool(crashing.servers, crashing.ask, make_sample, max_tries=4)
        batch = a_batch(run, prompts[:16])
        pool.submit(batch, rows_of(batch))
        await until(lambda: batch.is_complete)

        failed = {sample.row_key for sample in batch.samples() if sample.outcome == "failed"}
        assert failed == {prompts[4].row_key}

    asyncio.run(scenario())


def test_a_batch_that_is_dropped_while_a_server_is_kept_for_its_row_gives_the_server_back(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        server = a_server("http://a", 2, run)
        gate = asyncio.Event()

        async def ask(row: Row, server: Server) -> Sample:
            await gate.wait()
            return make_sample(row.prompt)

        pool = a_pool(Ready(server), ask, make_sample)
        going, accused, after = (a_batch(run, prompts[n : n + 1], f"train-00000{n}") for n in range(3))
        pool.submit(going, rows_of(going))
        pool.submit(accused, [Row(accused, prompts[1], deaths=2)])
        pool.submit(after, rows_of(after))
        kept = server.in_flight
        accused.stop("lost")
        await pool.drop(accused)
        then = server.in_flight
        gate.set()
        await until(lambda: after.is_complete)

        assert (kept, then) == (1, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [Transient, BadRequest])
def test_what_a_server_quotes_of_a_prompt_stands_in_the_row_and_not_in_the_log(
    run: Run,
    prompts: list[Prompt],
    make_sample: Callable[..., Sample],
    caplog: pytest.LogCaptureFixture,
    kind: type[ServerError],
) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        async def ask(row: Row, server: Server) -> Sample:
            raise kind("the server answered no", body="You asked: secret words")

        pool = a_pool(Ready(a_server("http://a", 4, run)), ask, make_sample, max_tries=2)
        batch = a_batch(run, prompts[:1])
        pool.submit(batch, rows_of(batch))
        await until(lambda: batch.is_complete)

        assert "secret words" in str(batch.samples()[0].error)

    asyncio.run(scenario())
    assert "the server answered no" in caplog.text
    assert "secret words" not in caplog.text


def test_a_refused_row_is_asked_once_and_the_others_go_on(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        asked = Counter[str]()

        async def ask(row: Row, server: Server) -> Sample:
            asked[row.prompt.row_key] += 1
            if row.prompt.row_key == prompts[0].row_key:
                raise BadRequest("too long", status=400, body="maximum context length")
            return make_sample(row.prompt)

        pool = a_pool(Ready(a_server("http://a", 4, run)), ask, make_sample)
        batch = a_batch(run, prompts)
        pool.submit(batch, rows_of(batch))
        await until(lambda: batch.is_complete)

        assert set(asked.values()) == {1}
        assert Counter(sample.outcome for sample in batch.samples()) == {"ok": 29, "failed": 1}

    asyncio.run(scenario())


def test_dropping_a_batch_cancels_its_rows_wherever_they_are_and_no_others(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        server = a_server("http://a", 6, run)
        gate = asyncio.Event()

        async def ask(row: Row, server: Server) -> Sample:
            if row.tries == 0 and row.prompt is prompts[0]:
                raise Transient("reset")
            await gate.wait()
            return make_sample(row.prompt)

        pool = a_pool(Ready(server), ask, make_sample)
        lost, kept = a_batch(run, prompts[:10]), a_batch(run, prompts[10:14], "train-000001")
        pool.submit(lost, rows_of(lost))
        pool.submit(kept, rows_of(kept))
        await asyncio.sleep(0)
        lost.stop("lost")

        await pool.drop(lost)
        gate.set()
        await until(lambda: kept.is_complete)
        await until(lambda: pool.num_in_flight == 0)

        assert lost.finished == {}
        assert pool.num_waiting == 0
        assert server.in_flight == 0

    asyncio.run(scenario())


def test_a_paused_pool_finishes_what_is_in_flight_and_starts_nothing(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        async def ask(row: Row, server: Server) -> Sample:
            await asyncio.sleep(0.01)
            return make_sample(row.prompt)

        pool = a_pool(Ready(a_server("http://a", 3, run)), ask, make_sample)
        batch = a_batch(run, prompts)
        pool.submit(batch, rows_of(batch))

        pool.pause(True)
        await until(lambda: pool.num_in_flight == 0)
        in_pause = len(batch.finished)
        pool.pause(False)
        await until(lambda: batch.is_complete)

        assert in_pause == 3

    asyncio.run(scenario())


def test_rows_that_are_taken_back_the_youngest_first_go_elsewhere_and_count_no_try(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        stuck, sound = a_server("http://stuck", 6, run), a_server("http://sound", 2, run)
        begun: list[str] = []

        async def ask(row: Row, server: Server) -> Sample:
            if server is stuck:
                begun.append(row.prompt.row_key)
                await asyncio.sleep(3600)
            return make_sample(row.prompt)

        pool = a_pool(Ready(stuck), ask, make_sample, max_tries=1)
        batch = a_batch(run, prompts[:6])
        rows = rows_of(batch)
        pool.submit(batch, rows)
        await until(lambda: len(begun) == 6)
        stuck.concurrency.configure(0, most=512, pinned=4)

        taken = await pool.recall(stuck, 2)
        waiting = [row.prompt.row_key for row in rows if row.avoid == stuck.url]

        assert (taken, stuck.in_flight, pool.num_waiting) == (2, 4, 2)
        assert waiting == begun[-2:]
        stuck.state = "resting"
        pool._servers.all[sound.url] = sound
        await pool.recall(stuck)
        await until(lambda: batch.is_complete)
        assert {sample.outcome for sample in batch.samples()} == {"ok"}
        assert {row.tries for row in rows} == {0}

    asyncio.run(scenario())


def test_rows_that_are_taken_back_go_on_though_who_took_them_back_is_cancelled(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample]
) -> None:
    async def scenario() -> None:
        stuck, sound = a_server("http://stuck", 2, run), a_server("http://sound", 2, run)
        begun: list[str] = []

        async def ask(row: Row, server: Server) -> Sample:
            if server is stuck:
                begun.append(row.prompt.row_key)
                await asyncio.sleep(3600)
            return make_sample(row.prompt)

        pool = a_pool(Ready(stuck), ask, make_sample)
        batch = a_batch(run, prompts[:2])
        pool.submit(batch, rows_of(batch))
        await until(lambda: len(begun) == 2)

        stuck.state = "resting"
        watch = asyncio.create_task(pool.recall(stuck))
        await asyncio.sleep(0)  # it has begun
        watch.cancel()  # as when the server is taken from the list
        pool._servers.all[sound.url] = sound
        pool.fill()

        await until(lambda: batch.is_complete)
        assert {sample.outcome for sample in batch.samples()} == {"ok"}

    asyncio.run(scenario())


def test_a_row_whose_fault_could_not_be_looked_into_is_asked_again(
    run: Run, prompts: list[Prompt], make_sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        server = a_server("http://a", 2, run)
        asked: list[str] = []

        async def ask(row: Row, server: Server) -> Sample:
            asked.append(row.prompt.row_key)
            if len(asked) == 1:
                raise Transient("reset")
            return make_sample(row.prompt)

        async def confirm(server: Server) -> bool:
            raise RuntimeError("a look that raises what nobody foresaw")

        servers = Ready(server)
        monkeypatch.setattr(servers, "confirm", confirm)
        pool = a_pool(servers, ask, make_sample)
        batch = a_batch(run, prompts[:2])
        pool.submit(batch, rows_of(batch))

        await until(lambda: batch.is_complete)
        assert {sample.outcome for sample in batch.samples()} == {"ok"}

    monkeypatch.setattr("workers.pool.LONGEST_BACKOFF_S", 0.01)
    asyncio.run(scenario())
