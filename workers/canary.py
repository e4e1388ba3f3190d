"""One real prompt before the first batch: a server that would spoil every row is found before it spoils one.

A model under another name, reasoning in a field that nobody reads, a tokenizer that is not the target's, a context or a
timeout too small for `max_tokens`: each of them gives answers that look well and cannot be used.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftfleet import drawing
from draftfleet.errors import BadRequest, Mismatch
from draftfleet.records import Prompt
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer
from workers import text_ids
from workers.dialects import Ask, Completion, Dialect, decode, openai
from workers.dialects.openai import REASONING_FIELDS, model_entries

Post = Callable[[str, dict[str, Any]], Awaitable[tuple[int, Mapping[str, str], str | bytes]]]
"""Sends a JSON body to a path of one server; gives HTTP status, headers and body. Raises Transient."""

KNOWN_FIELDS = {*REASONING_FIELDS, "role", "content", "refusal", "name", "tool_calls", "function_call", "audio"}
"""Fields of a message whose text is read, or is known to be no reasoning."""

QUESTION = "A train leaves at 9:40 and needs 95 minutes. When does it arrive? Think before you answer."
"""Asked where the real prompt got an answer without a thought: some models think only where it helps."""
QUESTION_TRIES = 4

TOKENS = 512
"""Of a canary's answer at most. Its rows wait for it, and all that is looked at shows by then."""

HEADROOM = 1.5
"""Under load a token takes longer than the canary's. A timeout below this many times its time is warned of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """What the canary saw. `warnings` are for the log: the run may go on. `context_tokens` is None if unknown."""

    server: str
    dialect: str
    completion: Completion
    context_tokens: int | None
    seconds: float
    seconds_per_token: float
    warnings: tuple[str, ...] = ()


async def check(
    post: Post,
    *,
    server: str,
    dialect: Dialect,
    models: Mapping[str, Any],
    model: str,
    sampling: Sampling,
    prompt: Prompt,
    tokenizer: TargetTokenizer | None,
    request_timeout_s: float,
    context_tokens: int | None = None,
) -> CanaryReport:
    """Ask a real prompt with the run's own sampling and look at everything that could be wrong.

    Where rows draw what they are asked with, each kind of thinking is tried; the report shows the first of them.

    `models` is the body of GET /v1/models. `tokenizer` is the target's, None where target.path is not set.
    `context_tokens` is what the target was made for (target.context_tokens, else draftfleet.tokens.context_tokens);
    a server's own `max_model_len` counts where it is smaller.

    Raises Mismatch, saying what to do; BadRequest where this prompt was refused, which may be its own fault: another
    prompt decides; or what else the request ended with: Overload, Transient, Unauthorized.
    """
    reports: list[CanaryReport] = []
    tried = drawing.to_try(sampling)
    for one in tried:
        limit = _context(server, models, model, one, context_tokens)
        report = await _Canary(post, server, dialect, model, one, prompt, tokenizer).run(limit, request_timeout_s)
        reports.append(report if len(tried) == 1 else replace(report, warnings=_with_way(report.warnings, one)))
    return replace(
        reports[0],
        seconds_per_token=max(report.seconds_per_token for report in reports),
        warnings=tuple(dict.fromkeys(warning for report in reports for warning in report.warnings)),
    )


@dataclass(frozen=True, slots=True)
class _Canary:
    post: Post
    server: str
    dialect: Dialect
    model: str
    sampling: Sampling
    prompt: Prompt
    tokenizer: TargetTokenizer | None

    async def run(self, limit: int | None, timeout_s: float) -> CanaryReport:
        prompt_ids = self.prompt_ids()
        self.check_room(prompt_ids, limit)
        body, completion, seconds = await self.ask()
        if completion.model and completion.model != self.model:
            raise Mismatch(_other_model(self.server, f"answers as {completion.model!r}", self.model))
        warnings = await self.check_reasoning(completion, _message(body))
        warnings += self.check_ids(completion, prompt_ids)
        pace = seconds / max(completion.completion_tokens, 1)
        if pace * self.sampling.max_tokens > timeout_s:
            # The first answer of a server may have waited for its warm-up: the faster of two counts.
            _, again, seconds = await self.ask()
            pace = min(pace, seconds / max(again.completion_tokens, 1))
        warnings += self.check_timeout(pace, timeout_s)
        return CanaryReport(
            server=self.server,
            dialect=self.dialect.NAME,
            completion=completion,
            context_tokens=limit,
            seconds=seconds,
            seconds_per_token=pace,
            warnings=tuple(warnings),
        )

    async def ask(self) -> tuple[dict[str, Any], Completion, float]:
        """Body, completion, and the seconds it took."""
        sampling = self.sampling.model_copy(update={"max_tokens": min(TOKENS, self.sampling.max_tokens)})
        ids = self.prompt_ids() if self.dialect.WANTS_PROMPT_IDS else None
        request = self.dialect.request(
            Ask(
                model=self.model,
                messages=self.prompt.messages,
                sampling=sampling,
                tools=self.prompt.tools,
                seed=sampling.seed,
                prompt_token_ids=ids,
            )
        )
        started = time.monotonic()
        status, headers, raw = await self.post(*request)
        seconds = time.monotonic() - started
        if status != 200:
            raise self.dialect.classify(status, headers, raw)
        body = decode(raw)
        return body, text_ids.read(self.dialect, body, self.tokenizer, ids), seconds

    def prompt_ids(self) -> list[int] | None:
        if self.tokenizer is None:
            return None
        return text_ids.prompt_ids(self.tokenizer, self.prompt, self.sampling)

    def check_room(self, prompt_ids: list[int] | None, limit: int | None) -> None:
        if limit is not None and prompt_ids is not None and len(prompt_ids) + self.sampling.max_tokens > limit:
            raise BadRequest(
                f"a prompt of {len(prompt_ids)} tokens and sampling.max_tokens = {self.sampling.max_tokens} are more "
                f"than the {limit} tokens of context at {self.server}: start it with a longer one (vLLM: "
                "--max-model-len), or ask for less in a new run."
            )

    async def check_reasoning(self, completion: Completion, message: Mapping[str, Any]) -> list[str]:
        if completion.reasoning:
            unwanted = self.sampling.thinking is False
            return [f"{self.server} sends reasoning though sampling.thinking is false"] if unwanted else []
        unread = [key for key, text in message.items() if key not in KNOWN_FIELDS and isinstance(text, str) and text]
        if unread:
            where = f"server {self.server} sends text in message.{unread[0]}, which no dialect reads"
            if self.sampling.thinking is not True:
                return [where]
            raise Mismatch(
                f"{where}: every row would lose its reasoning. It is read from {' or '.join(REASONING_FIELDS)}, or "
                "from <think> in the content: start the server with the reasoning parser of its model, or set "
                "worker.dialect."
            )
        return await self.check_thought() if self.sampling.thinking is True else []

    async def check_thought(self) -> list[str]:
        """The real prompt got no thought: ask for one, a few times, since a model may answer differently each time."""
        asked = replace(self.prompt, messages=[{"role": "user", "content": QUESTION}], tools=None)
        for _ in range(QUESTION_TRIES):
            _, completion, _ = await replace(self, prompt=asked).ask()
            if completion.reasoning:
                return [f"the model at {self.server} does not think each time, though sampling.thinking is true"]
        raise Mismatch(
            f"server {self.server} sends no reasoning, and sampling.thinking is true: its chat template must know "
            "enable_thinking, and it needs the reasoning parser of its model (vLLM: --reasoning-parser). A model that "
            "does not think wants sampling.thinking = false."
        )

    def check_ids(self, completion: Completion, prompt_ids: list[int] | None) -> list[str]:
        if completion.completion_tokens < 0:
            raise Mismatch(
                f"server {self.server} does not say how many tokens it produced (usage.completion_tokens): no row "
                "could be checked, so none would be trained on. Use a server that does."
            )
        if completion.token_ids is not None:
            return self.check_engine_ids(completion, completion.token_ids, prompt_ids)
        if self.tokenizer is None or prompt_ids is None:
            raise Mismatch(
                f"server {self.server} ({self.dialect.NAME}) gives no token ids, and target.path is not set: name the "
                "folder or hub name of the target there, so that its tokenizer can make them."
            )
        if completion.prompt_tokens != len(prompt_ids):
            raise Mismatch(_other_tokenizer(self.server, self.tokenizer, completion.prompt_tokens, len(prompt_ids)))
        ids = text_ids.retokenized(self.tokenizer, self.prompt, self.sampling, completion)
        # Of an answer that was cut, the last text may be lost: that tells nothing of the rows.
        if len(ids) == completion.completion_tokens or completion.outcome == "truncated":
            return []
        return [
            f"an answer that {self.server} counts as {completion.completion_tokens} tokens is {len(ids)} when "
            "tokenized again: rows like it are kept and not trained on"
        ]

    def check_engine_ids(self, completion: Completion, token_ids: list[int], prompt_ids: list[int] | None) -> list[str]:
        if len(token_ids) != completion.completion_tokens:
            raise Mismatch(
                f"server {self.server} gives {len(token_ids)} token ids and counts {completion.completion_tokens} "
                "tokens: its ids cannot be trusted. Update it."
            )
        if self.tokenizer is None or prompt_ids is None:
            return [f"target.path is not set: whether the model at {self.server} is the target cannot be checked"]
        theirs = completion.prompt_token_ids
        read = len(theirs) if theirs is not None and theirs != prompt_ids else completion.prompt_tokens
        if (theirs is not None and theirs != prompt_ids) or read not in (-1, len(prompt_ids)):
            raise Mismatch(_other_tokenizer(self.server, self.tokenizer, read, len(prompt_ids)))
        text = self.tokenizer.decode(token_ids)
        for name, part in (("reasoning", completion.reasoning), ("content", completion.content)):
            if part and part.strip() not in text:
                raise Mismatch(
                    f"the token ids of server {self.server} do not spell its {name} with the tokenizer of target.path "
                    f"= {self.tokenizer.path!r}: name the model there that the server serves."
                )
        return []

    def check_timeout(self, pace: float, timeout_s: float) -> list[str]:
        least = pace * self.sampling.max_tokens
        counted = f"{self.sampling.max_tokens} tokens at {pace:.3g} s each take {least:.3g} s at {self.server}"
        if timeout_s < least:
            raise Mismatch(
                f"worker.request_timeout_s = {timeout_s:g} would cut every long answer: {counted}, even when it has "
                f"nothing else to do. Set it to {math.ceil(least * HEADROOM)} or more, or leave it out."
            )
        if timeout_s < least * HEADROOM:
            return [f"worker.request_timeout_s = {timeout_s:g} is near: {counted} when it has nothing else to do"]
        return []


def _context(
    server: str, models: Mapping[str, Any], model: str, sampling: Sampling, target_tokens: int | None
) -> int | None:
    """The longest prompt + completion, where known. Raises Mismatch if the model is not served or has no room."""
    entries = model_entries(models)
    served = [str(entry["id"]) for entry in entries]
    if model not in served:
        raise Mismatch(_other_model(server, f"serves {', '.join(map(repr, served)) or 'no model'}", model))
    said = openai.context_tokens(entries[served.index(model)])
    limit = min((tokens for tokens in (said, target_tokens) if isinstance(tokens, int)), default=None)
    if limit is not None and sampling.max_tokens >= limit:
        raise Mismatch(
            f"sampling.max_tokens = {sampling.max_tokens} leaves no room for a prompt in the {limit} tokens of context "
            f"at {server}: start it with a longer one (vLLM: --max-model-len), or ask for less in a new run."
        )
    return limit


def _message(body: dict[str, Any]) -> dict[str, Any]:
    """Of a chat completion; other answers have no fields that could be overlooked."""
    choices = body.get("choices")
    return choices[0].get("message") or {} if choices else {}


def _with_way(warnings: Sequence[str], sampling: Sampling) -> tuple[str, ...]:
    """Each with what its canary was asked with, where that is a choice of the row's."""
    knobs = {"thinking": sampling.thinking, "reasoning_effort": sampling.reasoning_effort}
    asked = ", ".join(f"{name} = {json.dumps(value)}" for name, value in knobs.items() if value is not None)
    return tuple(f"{warning} (asked with {asked or 'thinking unset'})" for warning in warnings)


def _other_model(server: str, does: str, model: str) -> str:
    return (
        f"server {server} {does}, this run asks for {model!r}: start it with the run's model (vLLM: "
        f"--served-model-name {model}), or set target.model in a new run."
    )


def _other_tokenizer(server: str, tokenizer: TargetTokenizer, theirs: int, ours: int) -> str:
    return (
        f"server {server} reads the first prompt as {theirs} tokens, the tokenizer and chat template of target.path = "
        f"{tokenizer.path!r} make {ours} others of it: name the model there that the server serves, with the same chat "
        "template (vLLM: --chat-template)."
    )
