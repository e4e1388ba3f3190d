"""HTTP to the servers: one client per process, shared by all servers. What it returns is raw; dialects read it."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx2
from openai import DefaultAioHttpClient

from draftfleet.errors import Transient
from draftfleet.settings import Worker

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 10_000
"""Beyond any number of slots, so that a request never waits for a connection of another server."""

NO_ANSWER = (httpx2.HTTPError, aiohttp.ClientError, OSError)
"""What a request raises that got none. The transport lets some errors of aiohttp through as they are (openai 3.57)."""

Answer = tuple[int, Mapping[str, str], bytes]
"""HTTP status, headers, body."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a server says of itself, without having been asked a prompt."""

    models: dict[str, Any]
    metrics: str
    headers: Mapping[str, str]
    greeting: str = ""


class Unreachable(Exception):
    """A look at a server failed. `refused`: nothing listens there, so its process is gone."""

    def __init__(self, reason: str, *, refused: bool) -> None:
        super().__init__(reason)
        self.refused = refused


class Client:
    """To be made in the event loop that uses it. Nothing here retries: who asks decides what is asked again, and where.

    Requests go over the SDK's aiohttp transport and not through its `AsyncOpenAI`: that walks the body by its types and
    builds URL and headers anew, 0.4 ms of CPU a request (benchmarks/results/client_cpu_2-core-cpu_2026-11-30.md).
    """

    def __init__(self, knobs: Worker) -> None:
        self._knobs = knobs
        self._http = DefaultAioHttpClient(
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
            timeout=httpx2.Timeout(knobs.request_timeout_s, connect=knobs.connect_timeout_s),
        )
        self._asks: dict[tuple[str, str], tuple[httpx2.URL, dict[str, str]]] = {}

    async def complete(self, url: str, path: str, body: dict[str, Any]) -> Answer:
        """POST to a path of a server. Raises Transient if there was no answer."""
        address, headers = self._ask(url, path)
        try:
            response = await self._http.post(address, content=json.dumps(body).encode(), headers=headers)
        except NO_ANSWER as error:
            raise self._broken(url, error) from error
        return response.status_code, response.headers, response.content

    @asynccontextmanager
    async def stream(self, url: str, path: str, body: dict[str, Any]) -> AsyncGenerator[httpx2.Response]:
        """The same, to be read line by line as it comes. Raises Transient also where it breaks off meanwhile."""
        address, headers = self._ask(url, path)
        try:
            async with self._http.stream("POST", address, content=json.dumps(body).encode(), headers=headers) as answer:
                yield answer
        except NO_ANSWER as error:
            raise self._broken(url, error) from error

    async def look(self, url: str, *, is_new: bool = False) -> Look:
        """GET /v1/models, and /metrics where there is one; of a new one without it also /. Raises Unreachable."""
        response = await self._get(url, "/v1/models")
        if response.status_code != 200:
            raise Unreachable(f"GET /v1/models answered {response.status_code}", refused=False)
        try:
            models = response.json()
        except ValueError:
            raise Unreachable("GET /v1/models answered something that is no JSON", refused=False) from None
        if not isinstance(models, dict):
            raise Unreachable("GET /v1/models answered no JSON object", refused=False)
        metrics = await self._get(url, "/metrics")
        if metrics.status_code == 200:
            return Look(models, metrics.text, response.headers)
        greeting = (await self._get(url, "/")).text if is_new else ""
        return Look(models, "", response.headers, greeting)

    async def get(self, url: str, path: str) -> tuple[int, str]:
        """HTTP status and text of a page that a server may have. Raises Unreachable."""
        response = await self._get(url, path)
        return response.status_code, response.text

    def set(self, knobs: Worker) -> None:
        """Take over the keys of new settings. Timeouts stay."""
        self._knobs = self._knobs.model_copy(update={name: getattr(knobs, name) for name in ("api_key", "api_keys")})
        self._asks.clear()

    async def close(self) -> None:
        await self._http.aclose()

    def _ask(self, url: str, path: str) -> tuple[httpx2.URL, dict[str, str]]:
        if (url, path) not in self._asks:
            headers = {"Authorization": f"Bearer {self._key(url)}", "Content-Type": "application/json"}
            self._asks[url, path] = httpx2.URL(f"{url}{path}"), headers
        return self._asks[url, path]

    def _broken(self, url: str, error: BaseException) -> Transient:
        # The aiohttp transport calls every lost connection a ConnectTimeout: its causes tell the two apart.
        causes = list(_causes(error))
        if any(isinstance(cause, TimeoutError) for cause in causes):
            knobs = self._knobs
            return Transient(
                f"server {url} gave no answer within worker.request_timeout_s = {knobs.request_timeout_s:g} s "
                f"(connection: {knobs.connect_timeout_s:g} s)."
            )
        return Transient(f"the connection to server {url} broke: {causes[-1]!r}.", is_broken=True)

    def _key(self, server: str) -> str:
        return self._knobs.key(server) or "none"

    async def _get(self, server: str, path: str) -> httpx2.Response:
        try:
            return await self._http.get(
                f"{server}{path}",
                headers={"Authorization": f"Bearer {self._key(server)}"},
                timeout=httpx2.Timeout(PROBE_TIMEOUT_S),
            )
        except NO_ANSWER as error:
            causes = list(_causes(error))
            refused = any(isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED for cause in causes)
            raise Unreachable(str(causes[-1]) or repr(causes[-1]), refused=refused) from None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error itself and what it was raised from, the origin last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
