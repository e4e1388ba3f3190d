"""HTTP to the servers: one client per process, shared by all servers. What it returns is raw; dialects read it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
from openai import (
    APIConnectionError,
    APIStatusError,
    AsyncOpenAI,
    DefaultAioHttpClient,
)

from draftfleet.errors import Transient
from draftfleet.settings import Worker

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 10_000
"""Beyond any number of slots, so that a request never waits for a connection of another server."""

Answer = tuple[int, Mapping[str, str], bytes]
"""HTTP status, headers, body."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a server says of itself, without having been asked a prompt."""

    models: dict[str, Any]
    metrics: str
    headers: Mapping[str, str]


class Unreachable(Exception):
    """A look at a server failed. `refused`: nothing listens there, so its process is gone."""

    def __init__(self, reason: str, *, refused: bool) -> None:
        super().__init__(reason)
        self.refused = refused


class Client:
    """To be made in the event loop that uses it. The SDK's own retries are off: they send timed-out work again."""

    def __init__(self, knobs: Worker) -> None:
        self._knobs = knobs
        self._http = DefaultAioHttpClient(
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
            timeout=httpx2.Timeout(knobs.request_timeout_s, connect=knobs.connect_timeout_s),
        )
        self._sdk: dict[str, AsyncOpenAI] = {}

    async def complete(self, url: str, body: dict[str, Any]) -> Answer:
        """POST /v1/chat/completions. Raises Transient if there was no answer.

        The body goes as it is and the answer stays bytes: `create` walks the messages by their types, raw response or
        not (1.0 ms of CPU a request against 0.6, openai 3.57).
        """
        try:
            response = await self._client(url).post("/chat/completions", cast_to=httpx2.Response, body=body)
        except APIStatusError as error:
            return error.status_code, error.response.headers, error.response.content
        except APIConnectionError as error:
            # The aiohttp transport calls every lost connection a ConnectTimeout: its causes tell the two apart.
            causes = list(_causes(error))
            if any(isinstance(cause, TimeoutError) for cause in causes):
                knobs = self._knobs
                raise Transient(
                    f"server {url} gave no answer within worker.request_timeout_s = {knobs.request_timeout_s:g} s "
                    f"(connection: {knobs.connect_timeout_s:g} s)."
                ) from error
            raise Transient(f"the connection to server {url} broke: {causes[-1]!r}.") from error
        return response.status_code, response.headers, response.content

    async def look(self, url: str) -> Look:
        """GET /v1/models, and /metrics where there is one. Raises Unreachable."""
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
        return Look(models, metrics.text if metrics.status_code == 200 else "", response.headers)

    async def close(self) -> None:
        await self._http.aclose()

    def _key(self, server: str) -> str:
        return self._knobs.key(server) or "none"

    async def _get(self, server: str, path: str) -> httpx2.Response:
        try:
            return await self._http.get(
                f"{server}{path}",
                headers={"Authorization": f"Bearer {self._key(server)}"},
                timeout=httpx2.Timeout(PROBE_TIMEOUT_S),
            )
        except httpx2.HTTPError as error:
            causes = list(_causes(error))
            refused = any(isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED for cause in causes)
            raise Unreachable(str(causes[-1]) or repr(causes[-1]), refused=refused) from None

    def _client(self, url: str) -> AsyncOpenAI:
        if url not in self._sdk:
            self._sdk[url] = AsyncOpenAI(
                api_key=self._key(url),
                base_url=f"{url}/v1",
                http_client=self._http,
                max_retries=0,
                timeout=httpx2.Timeout(self._knobs.request_timeout_s, connect=self._knobs.connect_timeout_s),
            )
        return self._sdk[url]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error itself and what it was raised from, the origin last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
