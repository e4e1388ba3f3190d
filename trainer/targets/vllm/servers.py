"""The servers that states are asked of: whose turn it is, who rests after a failure, and what an answer means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from draftfleet.addresses import expand
from draftfleet.errors import BadRequest, Mismatch, Overload, ServerError, SettingsError, Transient, Unauthorized
from draftfleet.settings.capturing import Capture

CONNECT_S = 10.0
LONGEST_REST_S = 30.0
LOOK_S = 0.2


@dataclass(eq=False, slots=True)
class Server:
    url: str
    in_flight: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0  # time.monotonic()
    answered_at: float = 0.0
    is_known: bool = False  # it was looked at since it last came up
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def failed(self, error: Overload | Transient) -> None:
        """Let it rest, twice as long each time in a row: it may be loading. All that was in flight fails with it."""
        if error.status is None:  # it is gone, and may come back as another
            self.is_known = False
        if self.rests_until > time.monotonic():
            return
        self.rests_until = time.monotonic() + min(LONGEST_REST_S, 0.25 * 2**self.failures)
        self.failures += 1

    def answered(self) -> None:
        self.failures, self.rests_until, self.answered_at = 0, 0.0, time.monotonic()


class Servers:
    """To be used within one event loop. `size` processes share what `concurrency` allows."""

    def __init__(self, knobs: Capture, size: int = 1) -> None:
        self.all = [Server(address.url) for address in expand(knobs.servers, "capture.servers")]
        if not self.all:
            raise SettingsError(
                "trainer.target = vllm and capture.servers is empty: name the servers that hand out hidden states, as "
                '["http://127.0.0.1:8100"]. `draftfleet capture-command` prints how to start one.'
            )
        self._most = max(1, knobs.concurrency // size)
        self._line = asyncio.Lock()  # so that rows go in the order in which they came
        self._changed = asyncio.Event()
        self._is_open = True
        key = knobs.api_key.get_secret_value() if knobs.api_key else None
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(knobs.timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def end(self, timeout_s: float) -> None:
        """Nobody's turn comes any more. What is in flight may end, for so long."""
        self._is_open = False
        until = time.monotonic() + timeout_s
        while any(server.in_flight for server in self.all) and time.monotonic() < until:
            await self._change()

    async def _change(self) -> None:
        """Wait until a server has room again, or its rest may be over."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()

    @asynccontextmanager
    async def one(self, avoid: Collection[Server] = ()) -> AsyncGenerator[Server]:
        """The least busy server with room that does not rest, in turn; one of `avoid` if there is no other."""
        async with self._line:
            while not (choice := self._free()):
                if not self._is_open:
                    raise asyncio.CancelledError
                await self._change()
            server = min(choice, key=lambda server: (server in avoid, server.in_flight))
            server.in_flight += 1
        try:
            yield server
        finally:
            server.in_flight -= 1
            self._changed.set()

    def _free(self) -> list[Server]:
        now = time.monotonic()
        return [
            server
            for server in self.all
            if self._is_open
            and server.rests_until <= now
            # One that failed gets a single row, to see whether it is back.
            and server.in_flight < (1 if server.failures else self._most)
        ]

    async def models(self, server: Server) -> list[dict[str, Any]]:
        """What it says it serves. Raises ServerError."""
        answer = await self._send("GET", server, "/v1/models")
        models = answer.get("data")
        return models if isinstance(models, list) else []

    async def complete(self, server: Server, body: dict[str, Any], request: str) -> dict[str, Any]:
        """The answer to a completion that goes by the name `request`. Raises ServerError."""
        return await self._send("POST", server, "/v1/completions", json=body, headers={"X-Request-Id": request})

    async def _send(self, method: str, server: Server, path: str, **what: Any) -> dict[str, Any]:
        try:
            response = await self._client.request(method, server.url + path, **what)
        except httpx.TimeoutException as error:
            raise Transient(f"{server.url} did not answer in time ({type(error).__name__})") from None
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise Transient(f"{server.url} cannot be reached or broke off: {said}", is_broken=True) from None
        if response.status_code != httpx.codes.OK:
            raise _refusal(server, response)
        with suppress(ValueError):
            if isinstance(answer := response.json(), dict):
                return answer
        raise Mismatch(f"{server.url}{path} did not answer with a JSON object: is it a vLLM server?")


def _refusal(server: Server, response: httpx.Response) -> ServerError:
    """A 404 is of the model or the path, not of the row: it would come for every row."""
    status = response.status_code
    said = f"{server.url} answered {status}"
    body = response.text[:500]
    if status in (401, 403):
        return Unauthorized(f"{said}: set capture.api_key to its key", status=status)
    if status == httpx.codes.NOT_FOUND:
        return Mismatch(said, status=status, body=body)
    if status in (429, 503):
        return Overload(said, status=status, body=body)
    return (Transient if status >= 500 else BadRequest)(said, status=status, body=body)
