"""The two servers that are compared: what each is, one question to it, and what it counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftfleet.errors import Mismatch, NotReady, Transient
from draftfleet.records import Prompt
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer
from workers import dialects, text_ids
from workers.bench import counters
from workers.bench.counters import Counters
from workers.bench.streams import Answer
from workers.client import Client, Unreachable
from workers.dialects import Ask, Dialect
from workers.dialects.openai import model_entries

Name = Literal["with", "without"]
MEASURED = ("vllm", "sglang", "sglang-native")
FEW_TOKENS = 4
"""The first ones of an answer come without a draft."""
COUNTED_S = 3.0
"""A server may count a request a step after its answer has ended."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with the sampling that it is asked with, on either side."""

    prompt: Prompt
    sampling: Sampling


@dataclass(slots=True)
class Side:
    """A server with the drafter, or without. `tokenizer` is the target's, where the dialect asks with ids."""

    name: Name
    url: str
    client: Client
    dialect: Dialect
    model: str
    tokenizer: TargetTokenizer | None = None

    def ask_of(self, question: Question) -> Ask:
        ids = None
        if self.dialect.WANTS_PROMPT_IDS and self.tokenizer is not None:
            ids = text_ids.prompt_ids(self.tokenizer, question.prompt, question.sampling)
        return Ask(
            model=self.model,
            messages=question.prompt.messages,
            sampling=question.sampling,
            tools=question.prompt.tools,
            prompt_token_ids=ids,
        )

    async def ask(self, question: Question, salt: str) -> Answer:
        """Raises ServerError. Prompts with another `salt` share no prefix with it in vLLM's cache."""
        ask = self.ask_of(question)
        path, body = self.dialect.request(ask)
        body = {**body, "stream": True}
        if not self.dialect.WANTS_PROMPT_IDS:
            body["stream_options"] = {"include_usage": True}
        if self.dialect.NAME == "vllm":
            body["cache_salt"] = salt
        answer = Answer(time.perf_counter(), prompt_ids=ask.prompt_token_ids or [])
        async with self.client.stream(self.url, path, body) as response:
            if response.status_code != 200:
                raise self.dialect.classify(response.status_code, response.headers, await response.aread())
            async for line in response.aiter_lines():
                answer.take(line)
        if not answer.is_over or answer.finish_reason in (None, "abort", "error"):
            raise Transient(f"server {self.url} broke off an answer after {answer.tokens} tokens")
        if answer.tokens == 0:
            raise Mismatch(f"server {self.url} counted no tokens of an answer: it must tell usage.completion_tokens.")
        return answer

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, headers, raw = await self.client.complete(self.url, path, body)
        if status != 200:
            raise self.dialect.classify(status, headers, raw)
        return dialects.decode(raw)

    async def counters(self) -> Counters:
        """Raises NotReady."""
        try:
            status, page = await self.client.get(self.url, "/metrics")
        except Unreachable as error:
            raise NotReady(f"server {self.url} does not answer any more: {error}") from None
        return counters.read(page if status == 200 else "")

    async def counters_after(self, before: Counters, requests: int) -> Counters:
        """Once it has counted so many requests more than before, or has had its time to."""
        deadline = time.monotonic() + COUNTED_S
        while True:
            found = await self.counters()
            is_counted = found.requests is None or found.requests - (before.requests or 0) >= requests
            if is_counted or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.05)


async def look(
    client: Client, name: Name, url: str, *, model: str, dialect: str, tokenizer: TargetTokenizer | None
) -> Side:
    """`model` "": the first that it serves. `dialect` "auto": as it seems to be.

    Raises NotReady, or Mismatch where it is no server that can be measured, or serves another model.
    """
    try:
        seen = await client.look(url, is_new=True)
    except Unreachable as error:
        raise NotReady(f"--{name} {url}: it does not answer: {error}. Start it, and wait until it is ready.") from None
    spoken = dialects.detect(seen.models, seen.metrics, seen.headers, seen.greeting)
    chosen = dialect if dialect != "auto" else spoken or "openai"
    if chosen == "sglang" and tokenizer is not None:
        chosen = "sglang-native"
    if chosen not in MEASURED:
        raise Mismatch(
            f"--{name} {url} speaks {chosen}: only vLLM and SGLang tell what became of their drafts. Such a server is "
            'known by its /metrics page; worker.dialect = "vllm" takes it for one.'
        )
    served = [str(entry["id"]) for entry in model_entries(seen.models)]
    model = model or next(iter(served), "")
    if model not in served:
        raise Mismatch(
            f"--{name} {url} serves {', '.join(served) or 'nothing'}, and {model!r} is asked for: start it with "
            f"`--served-model-name {model}`, or name what it serves with --model."
        )
    return Side(name, url, client, dialects.load(chosen), model, tokenizer)


def check_alike(sides: Sequence[Side]) -> None:
    """Raises Mismatch where two servers are no pair."""
    if len({side.model for side in sides}) > 1:
        served = ", ".join(f"--{side.name} {side.url} serves {side.model}" for side in sides)
        raise Mismatch(
            f"{served}: two models are no comparison. Start both with one `--served-model-name`, or name it with "
            "--model if each serves it."
        )
    if len({side.dialect.NAME for side in sides}) > 1:
        spoken = ", ".join(f"--{side.name} {side.url} is {side.dialect.NAME}" for side in sides)
        raise Mismatch(f"{spoken}: two engines are no comparison of a drafter. Start one engine with it and without.")


async def check_drafting(side: Side, answers: Sequence[Answer]) -> None:
    """After a warm-up. Raises Mismatch where one that should draft does not, or one that should not does."""
    now = await side.counters()
    drafts = sum(answer.verified or 0 for answer in answers)
    is_drafting = now.is_drafting or drafts > 0
    if side.name == "without" and is_drafting:
        raise Mismatch(f"--without {side.url} drafts as well: start it without a drafter.")
    if side.name == "with" and not is_drafting:
        raise Mismatch(
            f"--with {side.url} does not draft: its /metrics page has no counters of drafts. Start it with the drafter "
            "(vLLM: `--speculative-config`; SGLang: `--speculative-draft-model-path`, `--enable-metrics`)."
        )
    tokens = sum(answer.tokens for answer in answers)
    if side.name == "with" and now.drafts == 0 and not drafts and tokens >= FEW_TOKENS:
        raise Mismatch(
            f"--with {side.url} has a drafter, and drafted nothing in {tokens} tokens: "
            "its log says why; max_position_embeddings of the drafter may be too small."
        )
