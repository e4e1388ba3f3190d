"""One server's slots, and looking at real (fake) ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from draftfleet.errors import Mismatch, NotReady
from draftfleet.ports import free_port
from draftfleet.settings import Worker
from draftfleet.testing import FakeServer
from workers.addresses import expand
from workers.client import Client, Look
from workers.concurrency import Concurrency
from workers.servers import Server, Servers


async def with_client(scenario: Callable[[Client], Awaitable[None]]) -> None:
    client = Client(Worker())
    try:
        await scenario(client)
    finally:
        await client.close()


async def until(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110  any condition
            await asyncio.sleep(0.01)


def pinned(limit: int, **fields: Any) -> Server:
    return Server("http://a", Concurrency(pinned=limit), state="ready", **fields)


def test_overload_takes_a_quarter_of_a_pinned_limit_once_per_burst_and_looks_give_it_back() -> None:
    server = pinned(40, in_flight=40)

    holds = [server.overloaded(None) for _ in range(10)]
    after_burst = server.limit
    for _ in range(20):
        server.look()

    assert after_burst == 30
    assert all(0 < hold <= 0.5 for hold in holds)
    assert server.limit == 40


def test_retry_after_is_honoured() -> None:
    server = pinned(4, cleared={"run"})

    held_s = server.overloaded(7.5)

    assert held_s == pytest.approx(7.5, abs=0.1)
    assert not server.can_take("run", alone=False)


def test_a_server_gets_rows_of_a_run_only_after_its_canary() -> None:
    server = pinned(4)

    before = server.can_take("run", alone=False)
    server.cleared.add("run")

    assert not before
    assert server.can_take("run", alone=False)


def test_a_second_suspect_is_kept_from_a_server_that_works_on_one() -> None:
    server = pinned(4, cleared={"run"}, suspects=1)

    assert server.can_take("run", alone=False)
    assert not server.can_take("run", alone=True)


def test_the_model_is_found_on_the_servers_and_its_dialect_and_context_with_it() -> None:
    async def scenario(client: Client) -> None:
        with (
            FakeServer(model="found", max_model_len=512) as one,
            FakeServer(model="found", shape="transformers") as two,
        ):
            servers = Servers(client, Worker(probe_interval_s=0.1), "")
            servers.set(expand([one.url, two.url]), Worker(probe_interval_s=0.1))
            await servers.wait_ready(20)

            assert servers.model == "found"
            assert [server.dialect.NAME for server in servers.ready] == ["vllm", "transformers"]
            assert [server.context_tokens for server in servers.ready] == [512, None]

    asyncio.run(with_client(scenario))


@pytest.mark.parametrize(("shape", "tokens"), [("vllm", 512), ("vllm-0.10", 512), ("sglang", 512), ("llamacpp", 512)])
def test_each_server_is_known_with_its_context(shape: Any, tokens: int) -> None:
    async def scenario(client: Client) -> None:
        with FakeServer(model="tiny", shape=shape, max_model_len=tokens) as server:
            servers = Servers(client, Worker(), "tiny")
            servers.set(expand([server.url]), Worker())
            await servers.wait_ready(20)

            [ready] = servers.ready
            assert shape.partition("-")[0] == ready.dialect.NAME
            assert ready.context_tokens == tokens
            assert ready.gauges is not None
            assert ready.gauges.running == 0

    asyncio.run(with_client(scenario))


def test_ollama_is_refused_with_the_reason_unless_it_is_asked_for() -> None:
    async def scenario(client: Client) -> None:
        with FakeServer(model="tiny", shape="ollama") as server:
            servers = Servers(client, Worker(), "tiny")
            servers.set(expand([server.url]), Worker())
            with pytest.raises(Mismatch, match=r"cuts a prompt .* without a word, and gives no token ids") as caught:
                await servers.wait_ready(20)
            assert server.url in str(caught.value)
            assert 'worker.dialect = "ollama"' in str(caught.value)

            forced = Servers(client, knobs := Worker(dialect="ollama"), "tiny")
            forced.set(expand([server.url]), knobs)
            await forced.wait_ready(20)
            assert [one.dialect.NAME for one in forced.ready] == ["ollama"]

    asyncio.run(with_client(scenario))


def test_a_mismatch_names_every_server_with_what_it_serves() -> None:
    async def scenario(client: Client) -> None:
        with FakeServer(model="one") as one, FakeServer(model="two") as two:
            servers = Servers(client, Worker(probe_interval_s=0.1), "one")
            servers.set(expand([one.url, two.url]), Worker(probe_interval_s=0.1))

            with pytest.raises(Mismatch) as caught:
                await servers.wait_ready(20)

            assert f"{one.url} serves one" in str(caught.value)
            assert f"{two.url} serves two" in str(caught.value)

    asyncio.run(with_client(scenario))


def test_a_loading_server_is_waited_for_and_a_budget_ends_the_wait() -> None:
    async def scenario(client: Client) -> None:
        with FakeServer(model="tiny", ready=False) as server:
            servers = Servers(client, Worker(probe_interval_s=0.05), "tiny")
            servers.set(expand([server.url]), Worker(probe_interval_s=0.05))

            with pytest.raises(NotReady, match="answered 503"):
                await servers.wait_ready(0.3)
            await asyncio.to_thread(server.change, ready=True)
            await servers.wait_ready(20)

            assert [one.url for one in servers.ready] == [server.url]

    asyncio.run(with_client(scenario))


def test_the_list_may_change_and_limits_with_it() -> None:
    async def scenario(client: Client) -> None:
        with FakeServer(model="tiny") as one, FakeServer(model="tiny") as two:
            servers = Servers(client, knobs := Worker(probe_interval_s=0.05), "tiny")
            servers.set(expand([one.url, two.url]), knobs)
            await servers.wait_ready(20)
            adaptive = [server.limit for server in servers.all.values()]

            gone = servers.all[two.url]
            servers.set(expand([one.url]), Worker(probe_interval_s=0.05, concurrency=7))
            pinned = [server.limit for server in servers.all.values()]
            servers.set(expand([one.url]), Worker(probe_interval_s=0.05, max_concurrency=5))
            freed = servers.all[one.url]

            assert (adaptive, pinned, freed.limit) == ([16, 16], [7], 5)
            assert freed.concurrency.pinned is None
            assert not gone.can_take("run", alone=False)
            assert gone not in servers.ready

    asyncio.run(with_client(scenario))


def test_a_port_of_a_range_is_absent_until_a_server_comes_up_there_and_never_ends_the_wait_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(client: Client) -> None:
        port = free_port()
        with FakeServer(model="tiny") as one, FakeServer(model="other") as stranger:
            knobs = Worker(probe_interval_s=0.05)
            servers = Servers(client, knobs, "tiny")
            strange_port = stranger.url.rpartition(":")[2]
            ranges = [f"http://127.0.0.1:{port}-{port}", f"http://127.0.0.1:{strange_port}-{strange_port}"]
            servers.set(expand([one.url, *ranges]), knobs)
            await servers.wait_ready(20)
            late = servers.all[f"http://127.0.0.1:{port}"]
            await until(lambda: late.failures > 2 and servers.all[stranger.url].state == "mismatched")

            assert late.state == "absent"
            assert late not in servers.present
            assert late.url not in caplog.text
            with FakeServer(model="tiny", port=port):
                await until(lambda: late.state == "ready")
            await until(lambda: late.state == "away")

    with caplog.at_level("INFO"):
        asyncio.run(with_client(scenario))


def test_a_server_that_does_not_get_ready_is_told_once_and_taken_when_it_does(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(client: Client) -> None:
        with FakeServer(model="tiny") as one, FakeServer(model="tiny", ready=False) as slow:
            knobs = Worker(probe_interval_s=0.05, ready_timeout_s=0.3)
            servers = Servers(client, knobs, "tiny")
            servers.set(expand([one.url, slow.url]), knobs)
            await servers.wait_ready(20)
            await until(lambda: servers.all[slow.url].is_late)
            looked = servers.all[slow.url].failures
            await until(lambda: servers.all[slow.url].failures > looked + 3)

            assert caplog.text.count("server did not get ready") == 1
            await asyncio.to_thread(slow.change, ready=True)
            await until(lambda: servers.all[slow.url].state == "ready")

    asyncio.run(with_client(scenario))


def test_a_server_rests_after_answers_that_broke_off_in_a_row_longer_each_time() -> None:
    server = pinned(4, cleared={"run"})

    broken = [server.broke() for _ in range(10)]
    first_s = server.rest()
    later_s = [server.rest() for _ in range(8)][-1]

    assert broken == [False] * 9 + [True]
    assert not server.cleared
    assert first_s <= 2
    assert 30 <= later_s <= 60

    server.completed(10, 1.0)
    assert server.rests == 0
    assert not server.broke()


def test_a_look_that_raises_what_nobody_foresaw_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(client: Client) -> None:
        look, looks = client.look, 0

        async def odd(url: str, *, is_new: bool = False) -> Look:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise RuntimeError("odd")
            return await look(url, is_new=is_new)

        client.look = odd
        with FakeServer(model="tiny") as server:
            servers = Servers(client, knobs := Worker(probe_interval_s=0.05), "tiny")
            servers.set(expand([server.url]), knobs)
            await servers.wait_ready(30)

        assert "server not looked at" in caplog.text

    asyncio.run(with_client(scenario))
