"""The fake server's HTTP side, on aiohttp."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import cache
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from draftfleet.testing import forms, gauges, wire
from draftfleet.testing.answers import Answer, Speaker
from draftfleet.testing.behaviour import OF_THE_SERVER, Behaviour, Fault, Kind
from draftfleet.testing.engine import Sequence
from draftfleet.testing.forms import FORMS
from draftfleet.testing.machine import Fate, Machine
from draftfleet.testing.speculation import Drafts, Verified
from draftfleet.testing.streams import PIECE_S, Stream
from draftfleet.tokens import TargetTokenizer, load

_FORM_AT = {form.path: form for form in FORMS.values()}


class App:
    """Handlers and counters of one fake server. To be made in the event loop that it lives in."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._machine = Machine(behaviour)
        self._speaker = _speaker(behaviour)
        self._requests = 0
        self._tokens = 0
        self._statuses: Counter[int] = Counter()
        self._struck: Counter[str] = Counter()
        self._rows: dict[str, dict[str, int]] = {}
        self._drafts = Drafts()
        self._life = 0

    @property
    def behaviour(self) -> Behaviour:
        return self._machine.behaviour

    def routes(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self.complete)
        for form in FORMS.values():
            app.router.add_post(form.path, self.complete)
        app.router.add_get("/", self.greet)
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
        form = _FORM_AT.get(request.path)
        if form and self.behaviour.shape not in form.shapes:
            return self._refuse(404, "Not Found")
        try:
            body: dict[str, Any] = json.loads(await request.read())
            body = form.read(body) if form else body
            prompt = self._speaker.read(body["ids"]) if form else json.dumps(body["messages"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError) as error:
            return self._refuse(422, f"the body is no completion request: {error!r}")
        row = self._row(body, prompt)
        row["requests"] += 1
        fault = self.behaviour.fault(prompt)
        response = await self._strike(request, fault) if fault else None
        return response or await self._answer(request, body, prompt, row, fault)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: str, row: dict[str, int], fault: Fault | None
    ) -> web.StreamResponse:
        if not self._machine.is_ready:
            return self._refuse(503, "Loading model")
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        refusal = wire.refusal(self.behaviour, body, key)
        if refusal is not None:
            return self._refuse(*refusal)
        kind = fault.kind if fault else None
        answer = self._speaker.answer(body, prompt)
        if kind in ("cut_in_thought", "end_in_thought"):
            answer = self._speaker.ended_in_thought(answer, cut=kind == "cut_in_thought")
        too_long = wire.too_long(self.behaviour, body, answer)
        if too_long is not None:
            status, message, more = too_long
            return self._refuse(status, message, **more)
        number = self._requests
        sequence = Sequence(answer.prompt_ids.count, answer.token_ids.count)
        if body.get("stream"):
            native = request.path in _FORM_AT
            stream = Stream(self.behaviour, body, answer, number=number, native=native, kind=kind)
            return await self._stream(request, stream, sequence, row)
        return await self._whole(request, body, sequence, answer, row, number=number, kind=kind)

    async def _whole(
        self,
        request: web.Request,
        body: dict[str, Any],
        sequence: Sequence,
        answer: Answer,
        row: dict[str, int],
        *,
        number: int,
        kind: Kind | None,
    ) -> web.StreamResponse:
        """The answer in one piece."""
        if not await self._is_worked(self._machine.work(sequence)):
            return _dropped(request)
        form = _FORM_AT.get(request.path)
        if form:
            said = forms.Said(answer, self._speaker.spelled(answer), answer.finish_reason, number, is_counted=True)
            payload = forms.body(form, self.behaviour, body, said, kind)
        else:
            payload = wire.completion(self.behaviour, body, answer, number=number, kind=kind)
        if kind == "cut":
            return await _cut(request, payload)
        self._count(answer, row)
        return await self._write(request, payload, sequence)

    async def _stream(
        self, request: web.Request, stream: Stream, sequence: Sequence, row: dict[str, int]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        work = asyncio.ensure_future(self._machine.work(sequence))
        try:
            await response.prepare(request)
            while not (await asyncio.wait([work], timeout=PIECE_S))[0]:
                for piece in stream.pieces(self._machine.made(sequence)):
                    await response.write(piece)
            if not await self._is_worked(work) or stream.is_cut:
                return _dropped(request)
        finally:
            work.cancel()
        for piece in stream.end(self._count(stream.answer, row)):
            await response.write(piece)
        await response.write_eof()
        return response

    async def _is_worked(self, work: Awaitable[Fate]) -> bool:
        """Whether there is an answer in the end. Of a request that was forgotten there is none to wait for."""
        fate = await work
        if fate == "forgotten":
            await self._machine.never()
        return fate == "answered"

    def _count(self, answer: Answer, row: dict[str, int]) -> Verified | None:
        """Returns what became of the drafts of the answer, where it plays to have any."""
        self._statuses[200] += 1
        self._tokens += answer.token_ids.count
        row["answered"] += 1
        row["tokens"] += answer.token_ids.count
        return self._counted().answer(answer.token_ids.count, self.behaviour.draft_tokens, self.behaviour.keep)

    def _counted(self) -> Drafts:
        """Of this life of the machine: those of a new process begin at zero."""
        if self._life != self._machine.crashes:
            self._life, self._drafts = self._machine.crashes, Drafts()
        return self._drafts

    async def _write(self, request: web.Request, payload: bytes, sequence: Sequence) -> web.StreamResponse:
        """Here, and not where aiohttp would do it by itself, so that it is known when it was done."""
        response = web.Response(body=payload, content_type="application/json")
        await response.prepare(request)
        await response.write_eof()
        assert sequence.ended_at is not None
        self._machine.lag.add(asyncio.get_running_loop().time() - sequence.ended_at)
        return response

    async def models(self, request: web.Request) -> web.StreamResponse:
        return self._look(request) or web.json_response(wire.models(self.behaviour))

    async def health(self, request: web.Request) -> web.StreamResponse:
        is_bare = self.behaviour.shape in ("vllm", "vllm-0.10", "sglang")
        return self._look(request) or (web.Response() if is_bare else web.json_response({"status": "ok"}))

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        text = gauges.text(self.behaviour, self._machine.readings(), self._counted())
        if self.behaviour.alive and text is None:
            return self._refuse(404, "Not Found")
        return self._look(request) or web.Response(text=text)

    async def version(self, request: web.Request) -> web.StreamResponse:
        version = wire.VERSIONS.get(self.behaviour.shape)
        if self.behaviour.alive and version is None:
            return self._refuse(404, "Not Found")
        return self._look(request) or web.json_response({"version": version})

    async def greet(self, request: web.Request) -> web.StreamResponse:
        if self.behaviour.alive and self.behaviour.shape != "ollama":
            return self._refuse(404, "Not Found")
        return self._look(request) or web.Response(text="Ollama is running")

    def _look(self, request: web.Request) -> web.StreamResponse | None:
        """What a look at a server that is dead or loading gets."""
        if not self.behaviour.alive:
            return _dropped(request)
        return None if self._machine.is_ready else self._refuse(503, "Loading model")

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(wire.HEADERS[self.behaviour.shape])

    # -- what is not

    async def change(self, request: web.Request) -> web.Response:
        """Merge a JSON object into the behaviour.

        `faults` replaces all faults, `fault` adds one, and `strike` is one that strikes at once, without a request.
        """
        try:
            change: dict[str, Any] = await request.json()
            added, struck = change.pop("fault", None), change.pop("strike", None)
            state = self.behaviour.model_dump() | change
            if added is not None:
                state["faults"] = [*state["faults"], added]
            behaviour = Behaviour.model_validate(state)
            fault = None if struck is None else Fault.model_validate(struck)
            if fault is not None and fault.kind not in OF_THE_SERVER:
                raise ValueError(f"{fault.kind} needs a request; only these strike at once: {', '.join(OF_THE_SERVER)}")
        except (ValidationError, ValueError, AttributeError) as error:
            return web.json_response({"error": str(error)}, status=400)
        self._machine.change(behaviour)
        self._speaker = _speaker(behaviour)
        if "faults" in change:
            self._machine.pardon()
        if fault is not None:
            self._struck[fault.kind] += 1
            self._machine.strike(fault)
        return web.json_response(self.behaviour.model_dump())

    async def stats(self, request: web.Request) -> web.Response:
        """Counters since it was made. `rows` counts per text of the last user message; `?rows=0` leaves it out."""
        readings, totals = self._machine.readings(), self._machine.totals()
        stats: dict[str, Any] = {
            "requests": self._requests,
            "in_flight": readings.running,
            "waiting": readings.waiting,
            "peak_in_flight": totals.peak,
            "kv_usage": readings.kv_usage,
            "preemptions": totals.preemptions,
            "generated_tokens": totals.generated_tokens,
            "tokens": self._tokens,
            "statuses": {str(status): count for status, count in self._statuses.items()},
            "faults": dict(self._struck),
            "crashes": self._machine.crashes,
            "reply_lag_s": self._machine.lag.summary(),
        }
        if request.query.get("rows") != "0":
            stats["rows"] = self._rows
        return web.json_response(stats)

    async def _strike(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        """The answer of a fault that leaves the model out of it; None for those that spoil its answer."""
        self._struck[fault.kind] += 1
        if fault.kind in OF_THE_SERVER:
            self._machine.strike(fault)
        match fault.kind:
            case "hang" | "ghost":
                await self._machine.never(fault)
                return _dropped(request)
            case "close" | "die":
                return _dropped(request)
            case "other_model":
                return None if self.behaviour.alive else _dropped(request)
            case "status":
                response = self._refuse(fault.status, "ordered fault")
                if fault.retry_after is not None:
                    response.headers["Retry-After"] = fault.retry_after
                if fault.retry_after_date_s is not None:
                    when = datetime.now(UTC) + timedelta(seconds=fault.retry_after_date_s)
                    response.headers["Retry-After"] = format_datetime(when, usegmt=True)
                return response
            case "garbage":
                self._statuses[200] += 1
                return web.Response(text="<html><body>Bad gateway</body></html>", content_type="text/html")
            case _:
                return None

    def _refuse(self, status: int, message: str, **more: Any) -> web.Response:
        self._statuses[status] += 1
        return web.json_response(wire.error(self.behaviour, status, message, **more), status=status)

    def _row(self, body: dict[str, Any], prompt: str) -> dict[str, int]:
        """By its last question, or by its whole prompt where that is made of ids."""
        last = next((message for message in reversed(body.get("messages", [])) if message["role"] == "user"), {})
        return self._rows.setdefault(str(last.get("content", prompt)), {"requests": 0, "answered": 0, "tokens": 0})


@cache
def _tokenizer(path: str) -> TargetTokenizer:
    """Kept: every change of behaviour asks for it."""
    return load(path)


def _speaker(behaviour: Behaviour) -> Speaker:
    tokenizer = _tokenizer(behaviour.tokenizer) if behaviour.tokenizer else None
    return Speaker(tokenizer, tokens=behaviour.tokens, spread=behaviour.spread, most_tokens=behaviour.most_tokens)


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
