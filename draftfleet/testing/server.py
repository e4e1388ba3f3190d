"""The fake server's HTTP side, on aiohttp."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from draftfleet.testing import wire
from draftfleet.testing.answers import Speaker
from draftfleet.testing.behaviour import Behaviour, Fault
from draftfleet.tokens import TargetTokenizer, load


class App:
    """Handlers and counters of one fake server."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._speaker = _speaker(behaviour)
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()
        self._requests = 0
        self._peak = 0
        self._tokens = 0
        self._statuses: Counter[int] = Counter()
        self._rows: dict[str, dict[str, int]] = {}

    def routes(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/version", self.version)
        app.router.add_post("/fake/faults", self.change)
        app.router.add_get("/fake/stats", self.stats)
        app.on_response_prepare.append(self._sign)
        return app

    # -- what is imitated

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self._requests += 1
        if not self.behaviour.alive:
            return _dropped(request)
        try:
            body: dict[str, Any] = json.loads(await request.read())
            prompt = json.dumps(body["messages"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            return self._refuse(422, "the body is no chat completion request")
        row = self._row(body)
        row["requests"] += 1
        fault = self.behaviour.fault(prompt)
        response = await self._strike(request, fault) if fault else None
        return response or await self._answer(request, body, prompt, row, fault)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: str, row: dict[str, int], fault: Fault | None
    ) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        refusal = wire.refusal(self.behaviour, body, key)
        if refusal is not None:
            return self._refuse(*refusal)
        kind = fault.kind if fault else None
        answer = self._speaker.answer(body, prompt)
        if kind in ("cut_in_thought", "end_in_thought"):
            answer = self._speaker.ended_in_thought(answer, cut=kind == "cut_in_thought")
        refusal = wire.too_long(self.behaviour, body, answer)
        if refusal is not None:
            return self._refuse(*refusal)
        async with self._slot():
            await self._take_time(len(answer.token_ids))
        if not self.behaviour.alive:
            return _dropped(request)
        with_ids = bool(body.get("return_token_ids"))
        spoken = wire.completion(self.behaviour, answer, number=self._requests, kind=kind, with_ids=with_ids)
        payload = json.dumps(spoken).encode()
        if kind == "cut":
            return await _cut(request, payload)
        self._statuses[200] += 1
        self._tokens += len(answer.token_ids)
        row["answered"] += 1
        row["tokens"] += len(answer.token_ids)
        return web.Response(body=payload, content_type="application/json")

    async def models(self, request: web.Request) -> web.StreamResponse:
        return self._look(request) or web.json_response(wire.models(self.behaviour))

    async def health(self, request: web.Request) -> web.StreamResponse:
        well = web.Response() if self.behaviour.shape == "vllm" else web.json_response({"status": "ok"})
        return self._look(request) or well

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if self.behaviour.alive and self.behaviour.shape != "vllm":
            return self._refuse(404, "Not Found")
        text = wire.metrics(self.behaviour, running=self._running, waiting=len(self._queue), tokens=self._tokens)
        return self._look(request) or web.Response(text=text)

    async def version(self, request: web.Request) -> web.StreamResponse:
        if self.behaviour.alive and self.behaviour.shape != "vllm":
            return self._refuse(404, "Not Found")
        return self._look(request) or web.json_response({"version": "0.33.0"})

    def _look(self, request: web.Request) -> web.StreamResponse | None:
        """What a look at a server that is dead or loading gets."""
        if not self.behaviour.alive:
            return _dropped(request)
        return None if self.behaviour.ready else self._refuse(503, "loading")

    # -- what is not

    async def change(self, request: web.Request) -> web.Response:
        """Merge a JSON object into the behaviour. `faults` replaces all faults, `fault` adds one."""
        change: dict[str, Any] = await request.json()
        added = change.pop("fault", None)
        state = self.behaviour.model_dump() | change
        if added is not None:
            state["faults"] = [*state["faults"], added]
        try:
            self.behaviour = Behaviour.model_validate(state)
        except ValidationError as error:
            return web.json_response({"error": str(error)}, status=400)
        self._speaker = _speaker(self.behaviour)
        self._wake()
        return web.json_response(self.behaviour.model_dump())

    async def stats(self, request: web.Request) -> web.Response:
        """Counters; `rows` counts per text of the last user message."""
        return web.json_response(
            {
                "requests": self._requests,
                "in_flight": self._running,
                "waiting": len(self._queue),
                "peak_in_flight": self._peak,
                "tokens": self._tokens,
                "statuses": {str(status): count for status, count in self._statuses.items()},
                "rows": self._rows,
            }
        )

    async def _strike(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        """The answer of a fault that leaves the model out of it; None for those that spoil its answer."""
        match fault.kind:
            case "hang":
                while fault in self.behaviour.faults and self.behaviour.alive:
                    await self._changed.wait()
                return _dropped(request)
            case "close":
                return _dropped(request)
            case "die":
                self.behaviour.alive = False
                self._wake()
                return _dropped(request)
            case "status":
                response = self._refuse(fault.status, "ordered fault")
                if fault.retry_after is not None:
                    response.headers["Retry-After"] = fault.retry_after
                return response
            case "garbage":
                self._statuses[200] += 1
                return web.Response(text="<html><body>Bad gateway</body></html>", content_type="text/html")
            case "other_model":
                self.behaviour.model = "other"
            case _:
                pass
        return None

    def _refuse(self, status: int, message: str) -> web.Response:
        self._statuses[status] += 1
        return web.json_response(wire.error(self.behaviour, status, message), status=status)

    def _row(self, body: dict[str, Any]) -> dict[str, int]:
        last = next((message for message in reversed(body["messages"]) if message["role"] == "user"), {})
        return self._rows.setdefault(str(last.get("content")), {"requests": 0, "answered": 0, "tokens": 0})

    # -- time and room

    async def _take_time(self, num_tokens: int) -> None:
        """Ends early when the server dies."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.behaviour.latency_s + self.behaviour.seconds_per_token * num_tokens
        while self.behaviour.alive and end > loop.time():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - loop.time())

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        if self.behaviour.slots is not None and self._running >= self.behaviour.slots:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._queue:
                    self._queue.remove(turn)
                else:
                    self._leave()
                raise
        else:
            self._running += 1
        self._peak = max(self._peak, self._running)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._running -= 1
        self._let_in()

    def _wake(self) -> None:
        """The behaviour has changed: those who wait for something look again."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._let_in()

    def _let_in(self) -> None:
        """Give free slots to those who wait, first come first served. A dead server lets all go."""
        slots = self.behaviour.slots if self.behaviour.alive else None
        while self._queue and (slots is None or self._running < slots):
            turn = self._queue.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "uvicorn"
        response.headers.update(wire.HEADERS[self.behaviour.shape])


@cache
def _tokenizer(path: str) -> TargetTokenizer:
    """Kept: every change of behaviour asks for it."""
    return load(path)


def _speaker(behaviour: Behaviour) -> Speaker:
    tokenizer = _tokenizer(behaviour.tokenizer) if behaviour.tokenizer else None
    return Speaker(tokenizer, behaviour.tokens, behaviour.spread)


def _dropped(request: web.Request) -> web.Response:
    """Close the connection; the response goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _cut(request: web.Request, payload: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(payload)), "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(payload[: len(payload) // 2])
    return _dropped(request)
