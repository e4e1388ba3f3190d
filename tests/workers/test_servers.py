"""One server's slots, and looking at real (fake) ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from draftfleet.errors import Mismatch, NotReady
from draftfleet.settings import Worker
from draftfleet.testing import FakeServer
from workers.addresses import expand
from workers.client import Client
from workers.concurrency import Concurrency
from workers.servers import Server, Servers


async def with_client(scenario: Callable[[Client], Awaitable[None]]) -> None:
    client = Client(Worker())
    try:
        await scenario(client)
    finally:
        await client.close()


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
