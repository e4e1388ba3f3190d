"""The fake server's HTTP side, on aiohttp."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from draftfleet.testing.answers import Answer, Speaker
from draftfleet.testing.behaviour import Behaviour, Fault
from draftfleet.tokens import load


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
        response = response or self._refused(request, body)
        if response is not None:
            return response
        answer = self._speaker.answer(body, prompt)
        if fault and fault.kind in ("cut_in_thought", "end_in_thought"):
            answer = self._speaker.ended_in_thought(answer, cut=fault.kind == "cut_in_thought")
        limit = self.behaviour.max_model_len
        if limit is not None and len(answer.prompt_ids) + (body.get("max_tokens") or 1) > limit:
            return self._refuse(400, _TOO_LONG.format(limit, body.get("max_tokens") or 1, len(answer.prompt_ids)))
        async with self._slot():
            await self._take_time(len(answer.token_ids))
        if not self.behaviour.alive:
            return _dropped(request)
        payload = json.dumps(self._body(body, answer, fault)).encode()
        if fault and fault.kind == "cut":
            return await _cut(request, payload)
        self._statuses[200] += 1
        self._tokens += len(answer.token_ids)
        row["answered"] += 1
        row["tokens"] += len(answer.token_ids)
        return web.Response(body=payload, content_type="application/json")

    async def models(self, request: web.Request) -> web.StreamResponse:
        if not self.behaviour.alive:
            return _dropped(request)
        if not self.behaviour.ready:
            return self._refuse(503, "loading")
        entry: dict[str, Any] = {"id": self.behaviour.model, "object": "model", "created": 0}
        if self.behaviour.shape == "vllm":
            entry |= {"owned_by": "vllm", "root": self.behaviour.model, "parent": None}
            entry["max_model_len"] = self.behaviour.max_model_len
        elif self.behaviour.shape == "transformers":
            entry |= {"owned_by": "local", "status": {"value": "loaded"}}
        else:
            entry |= {"owned_by": "fake"}
        return web.json_response({"object": "list", "data": [entry]})

    async def health(self, request: web.Request) -> web.StreamResponse:
        if not self.behaviour.alive:
            return _dropped(request)
        if not self.behaviour.ready:
            return self._refuse(503, "loading")
        return web.Response() if self.behaviour.shape == "vllm" else web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if not self.behaviour.alive:
            return _dropped(request)
        if self.behaviour.shape != "vllm":
            return self._refuse(404, "Not Found")
        label = f'{{engine="0",model_name="{self.behaviour.model}"}}'
        values = {
            "num_requests_running": self._running,
            "num_requests_waiting": len(self._queue),
            "kv_cache_usage_perc": min(self._running / (self.behaviour.slots or 256), 1.0),
            "num_preemptions_total": 0,
            "generation_tokens_total": self._tokens,
        }
        return web.Response(text="".join(f"vllm:{name}{label} {float(value)}\n" for name, value in values.items()))

    async def version(self, request: web.Request) -> web.StreamResponse:
        if self.behaviour.shape != "vllm":
            return self._refuse(404, "Not Found")
        return web.json_response({"version": "0.33.0"})

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
        self._changed.set()
        self._changed = asyncio.Event()
        self._let_in()
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
                self._changed.set()
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

    def _refused(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        """What a healthy server refuses by itself."""
        key = self.behaviour.api_key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return self._refuse(401, "Unauthorized")
        if not self.behaviour.ready:
            return self._refuse(503, "loading")
        if body.get("model") != self.behaviour.model:
            if self.behaviour.shape == "transformers":
                return self._refuse(400, f"Server is pinned to '{self.behaviour.model}'; requested '{body['model']}'.")
            return self._refuse(404, f"The model `{body.get('model')}` does not exist.")
        if self.behaviour.shape == "transformers" and "return_token_ids" in body:
            return self._refuse(422, "Unexpected fields in the request: {'return_token_ids'}")
        return None

    def _refuse(self, status: int, message: str) -> web.Response:
        self._statuses[status] += 1
        if self.behaviour.shape == "transformers":
            return web.json_response({"detail": message}, status=status)
        error = {"message": message, "type": "FakeError", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    def _body(self, request: dict[str, Any], answer: Answer, fault: Fault | None) -> dict[str, Any]:
        kind = fault.kind if fault else None
        if kind == "no_reasoning":
            answer = replace(answer, reasoning=None, content=answer.content or "")
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if self.behaviour.shape == "openai" and answer.reasoning and kind != "rename_reasoning":
            closed = f"\n</think>\n\n{answer.content}" if answer.content else ""
            message["content"] = f"<think>\n{answer.reasoning}{closed}"
        elif answer.reasoning:
            field = "reasoning" if self.behaviour.shape == "vllm" else "reasoning_content"
            message["thoughts" if kind == "rename_reasoning" else field] = answer.reasoning
        if self.behaviour.shape == "transformers":
            message["content"] = message["content"] or ""
        choice: dict[str, Any] = {"index": 0, "message": message}
        choice["finish_reason"] = "abort" if kind == "abort" else answer.finish_reason
        body: dict[str, Any] = {"id": f"chatcmpl-{self._requests}", "object": "chat.completion"}
        body |= {"created": int(time.time()), "model": self.behaviour.model, "choices": [choice]}
        if kind != "no_usage":
            prompt, completion = len(answer.prompt_ids), len(answer.token_ids)
            body["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
        if self.behaviour.shape == "vllm" and request.get("return_token_ids") and kind != "no_ids":
            body["prompt_token_ids"] = answer.prompt_ids
            choice["token_ids"] = answer.token_ids[:-1] if kind == "wrong_ids" else answer.token_ids
        return body

    def _row(self, body: dict[str, Any]) -> dict[str, int]:
        last = next((message for message in reversed(body["messages"]) if message["role"] == "user"), {})
        return self._rows.setdefault(str(last.get("content")), {"requests": 0, "answered": 0, "tokens": 0})

    # -- time and room

    async def _take_time(self, num_tokens: int) -> None:
        seconds = self.behaviour.latency_s + self.behaviour.seconds_per_token * num_tokens
        if seconds:
            await asyncio.sleep(seconds)

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

    def _let_in(self) -> None:
        """Give free slots to those who wait, first come first served."""
        while self._queue and (self.behaviour.slots is None or self._running < self.behaviour.slots):
            turn = self._queue.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "uvicorn"


_TOO_LONG = (
    "This model's maximum context length is {} tokens. However, you requested {} output tokens and your prompt "
    "contains at least {} input tokens. Please reduce the length of the input prompt or the number of requested "
    "output tokens."
)


def _speaker(behaviour: Behaviour) -> Speaker:
    tokenizer = load(behaviour.tokenizer) if behaviour.tokenizer else None
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
