"""How the client tells a server that is gone from one that is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pydantic import SecretStr

from draftfleet.errors import Transient
from draftfleet.ports import free_port
from draftfleet.settings import Worker
from draftfleet.testing import FakeServer
from workers.client import Client, Unreachable

CHAT = "/v1/chat/completions"
BODY = {"model": "target", "messages": [{"role": "user", "content": "Question?"}], "max_tokens": 8}


def with_client(scenario: Callable[[Client], Awaitable[None]], knobs: Worker | None = None) -> None:
    async def run() -> None:
        client = Client(knobs or Worker())
        try:
            await scenario(client)
        finally:
            await client.close()

    asyncio.run(run())


def test_a_port_where_nothing_listens_is_a_server_that_is_gone() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def scenario(client: Client) -> None:
        with pytest.raises(Unreachable) as look:
            await client.look(url)
        with pytest.raises(Transient, match=r"the connection to server .* broke: ConnectionRefused"):
            await client.complete(url, CHAT, BODY)

        assert look.value.refused

    with_client(scenario)


def test_a_connection_that_is_dropped_is_no_proof_that_the_server_is_gone() -> None:
    async def scenario(client: Client) -> None:
        with FakeServer(alive=False) as server:
            with pytest.raises(Unreachable) as look:
                await client.look(server.url)
            with pytest.raises(Transient, match="broke: ServerDisconnected"):
                await client.complete(server.url, CHAT, BODY)

        assert not look.value.refused

    with_client(scenario)


def test_an_answer_that_does_not_come_is_told_with_the_limit() -> None:
    async def scenario(client: Client) -> None:
        with FakeServer() as server:
            server.fault("hang")
            with pytest.raises(Transient, match=r"worker\.request_timeout_s = 0\.3 s"):
                await client.complete(server.url, CHAT, BODY)
            server.clear()

    with_client(scenario, Worker(request_timeout_s=0.3))


def test_status_and_body_of_a_refusal_come_back_as_they_are() -> None:
    async def scenario(client: Client) -> None:
        with FakeServer() as server:
            server.fault("status", status=429, retry_after="7")
            status, headers, body = await client.complete(server.url, CHAT, BODY)

        assert (status, headers["retry-after"]) == (429, "7")
        assert b"ordered fault" in body

    with_client(scenario)


def test_keys_of_new_settings_are_sent_to_servers_that_were_asked_before() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def scenario(client: Client) -> None:
        with pytest.raises(Transient):
            await client.complete(url, CHAT, BODY)
        client.set(Worker(api_keys={url: SecretStr("another-key")}))
        with pytest.raises(Transient):
            await client.complete(url, CHAT, BODY)

        assert client._asks[url, CHAT][1]["Authorization"] == "Bearer another-key"

    with_client(scenario)
