"""One real prompt before the first batch: a server that would spoil every row is found before it spoils one.

A model under another name, reasoning in a field that nobody reads, a tokenizer that is not the target's, a context or a
timeout too small for `max_tokens`: each of them gives answers that look well and cannot be used.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from draftfleet.errors import BadRequest, Mismatch
from draftfleet.records import Prompt
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer
from workers.dialects import Completion, Dialect, decode
from workers.dialects.openai import REASONING_FIELDS, model_entries

Post = Callable[[dict[str, Any]], Awaitable[tuple[int, Mapping[str, str], str | bytes]]]
"""Sends a JSON body to /v1/chat/completions of one server; gives HTTP status, headers and body. Raises Transient."""

KNOWN_FIELDS = {*REASONING_FIELDS, "role", "content", "refusal", "name", "tool_calls", "function_call", "audio"}
"""Fields of a message whose text is read, or is known to be no reasoning."""

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


class _RowFault(Exception):
    """May be the prompt's fault: another prompt decides."""


async def check(
    post: Post,
    *,
    server: str,
    dialect: Dialect,
    models: Mapping[str, Any],
    model: str,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    tokenizer: TargetTokenizer | None,
    request_timeout_s: float,
    context_tokens: int | None = None,
) -> CanaryReport:
    """Ask a real prompt with the run's own sampling and look at everything that could be wrong.

    `models` is the body of GET /v1/models. `tokenizer` is the target's, None where target.path is not set.
    `context_tokens` is what the target was made for (target.context_tokens, else draftfleet.tokens.context_tokens);
    a server's own `max_model_len` counts where it is smaller. Of `prompts`, the first is asked; the next ones only if
    what was wrong could be that prompt's own fault (the server refused it, or the model did not think): a few do.

    Raises Mismatch, saying what to do; or what else the request ended with: Overload, Transient, Unauthorized.
    """
    limit = _context(server, models, model, context_tokens)
    fault: _RowFault | None = None
    for prompt in prompts:
        try:
            return await _ask(post, server, dialect, model, sampling, prompt, tokenizer, request_timeout_s, limit)
        except _RowFault as error:
            fault = error
    raise Mismatch(str(fault) if fault else f"server {server}: there is no prompt to try it with.")


async def _ask(
    post: Post,
    server: str,
    dialect: Dialect,
    model: str,
    sampling: Sampling,
    prompt: Prompt,
    tokenizer: TargetTokenizer | None,
    request_timeout_s: float,
    limit: int | None,
) -> CanaryReport:
    prompt_ids = _prompt_ids(tokenizer, prompt, sampling)
    _check_room(server, sampling, prompt_ids, limit)
    request = dialect.request(model, prompt.messages, sampling, tools=prompt.tools, seed=sampling.seed)
    body, completion, seconds = await _timed(post, server, dialect, request)
    if completion.model and completion.model != model:
        raise Mismatch(
            f"server {server} answers as model {completion.model!r}, this run asks for {model!r}: start it with the "
            f"run's model (vLLM: --served-model-name {model}), or set target.model in a new run."
        )
    warnings = [
        *_check_reasoning(server, sampling, completion, body["choices"][0]["message"]),
        *_check_ids(server, dialect, completion, prompt, prompt_ids, tokenizer, sampling),
    ]
    pace = seconds / max(completion.completion_tokens, 1)
    if pace * sampling.max_tokens > request_timeout_s:
        # The first answer of a server may have waited for its warm-up: the faster of two counts.
        _, again, seconds = await _timed(post, server, dialect, request)
        pace = min(pace, seconds / max(again.completion_tokens, 1))
    warnings += _check_timeout(server, sampling, pace, request_timeout_s)
    return CanaryReport(
        server=server,
        dialect=dialect.NAME,
        completion=completion,
        context_tokens=limit,
        seconds=seconds,
        seconds_per_token=pace,
        warnings=tuple(warnings),
    )


async def _timed(
    post: Post, server: str, dialect: Dialect, request: dict[str, Any]
) -> tuple[dict[str, Any], Completion, float]:
    started = time.monotonic()
    status, headers, raw = await post(request)
    seconds = time.monotonic() - started
    if status != 200:
        error = dialect.classify(status, headers, raw)
        if isinstance(error, BadRequest):
            fields = ", ".join(sorted(request))
            raise _RowFault(
                f"server {server} refuses this run's requests: {error}. The fields sent were {fields}: take what it "
                f"does not know out of sampling.extra_body, or set worker.dialect if {dialect.NAME} is the wrong one."
            )
        raise error
    body = decode(raw)
    return body, dialect.parse(body), seconds


def _context(server: str, models: Mapping[str, Any], model: str, target_tokens: int | None) -> int | None:
    entries = model_entries(models)
    served = [str(entry["id"]) for entry in entries]
    if model not in served:
        raise Mismatch(
            f"server {server} serves {', '.join(map(repr, served)) or 'no model'}, this run asks for {model!r}: start "
            f"it with the run's model (vLLM: --served-model-name {model}), or set target.model in a new run."
        )
    said = entries[served.index(model)].get("max_model_len")
    known = [limit for limit in (said, target_tokens) if isinstance(limit, int)]
    return min(known, default=None)


def _prompt_ids(tokenizer: TargetTokenizer | None, prompt: Prompt, sampling: Sampling) -> list[int] | None:
    if tokenizer is None:
        return None
    kwargs = cast(dict[str, Any] | None, sampling.extra_body.get("chat_template_kwargs"))
    return tokenizer.prompt_ids(prompt.messages, prompt.tools, sampling.thinking, kwargs)


def _check_room(server: str, sampling: Sampling, prompt_ids: list[int] | None, limit: int | None) -> None:
    if limit is None:
        return
    if sampling.max_tokens >= limit:
        raise Mismatch(
            f"sampling.max_tokens = {sampling.max_tokens} leaves no room for a prompt in the {limit} tokens of context "
            f"at {server}: start it with a longer one (vLLM: --max-model-len), or ask for less in a new run."
        )
    if prompt_ids is not None and len(prompt_ids) + sampling.max_tokens > limit:
        raise _RowFault(
            f"prompts of {len(prompt_ids)} tokens and sampling.max_tokens = {sampling.max_tokens} are more than the "
            f"{limit} tokens of context at {server}: start it with a longer one (vLLM: --max-model-len), or ask for "
            "less in a new run."
        )


def _check_reasoning(server: str, sampling: Sampling, completion: Completion, message: Mapping[str, Any]) -> list[str]:
    if completion.reasoning:
        unwanted = sampling.thinking is False
        return [f"server {server} sends reasoning though sampling.thinking is false"] if unwanted else []
    unread = sorted(key for key, text in message.items() if key not in KNOWN_FIELDS and isinstance(text, str) and text)
    if unread:
        where = f"server {server} sends text in message.{unread[0]}, which no dialect reads"
        if sampling.thinking is True:
            raise Mismatch(
                f"{where}; reasoning is read from {' or '.join(REASONING_FIELDS)} or from <think> in the content. "
                "Every row would lose its reasoning: start the server with the reasoning parser of this model, or "
                "set worker.dialect."
            )
        return [where]
    if sampling.thinking is True:
        raise _RowFault(
            f"server {server} sent no reasoning (finish_reason {completion.finish_reason}, "
            f"{completion.completion_tokens} tokens), and sampling.thinking is true: the model's template must know "
            "enable_thinking, and the server needs the reasoning parser of this model (vLLM: --reasoning-parser)."
        )
    return []


def _check_ids(
    server: str,
    dialect: Dialect,
    completion: Completion,
    prompt: Prompt,
    prompt_ids: list[int] | None,
    tokenizer: TargetTokenizer | None,
    sampling: Sampling,
) -> list[str]:
    if completion.completion_tokens < 0:
        raise Mismatch(
            f"server {server} does not say how many tokens it produced (usage.completion_tokens): no row could be "
            "checked, so none would be trained on. Use a server that does."
        )
    if completion.token_ids is not None:
        return _check_engine_ids(server, completion, completion.token_ids, prompt_ids, tokenizer)
    if tokenizer is None or prompt_ids is None:
        raise Mismatch(
            f"server {server} ({dialect.NAME}) gives no token ids, and target.path is not set: name the folder or hub "
            "name of the target there, so that its tokenizer can make them."
        )
    if completion.prompt_tokens != len(prompt_ids):
        raise Mismatch(_other_tokenizer(server, tokenizer, completion.prompt_tokens, len(prompt_ids)))
    ids = tokenizer.completion_ids(
        prompt.messages,
        reasoning=completion.reasoning,
        content=completion.content,
        tool_calls=completion.tool_calls,
        finish_reason=completion.finish_reason,
        completion_tokens=completion.completion_tokens,
        tools=prompt.tools,
        thinking=sampling.thinking,
        template_kwargs=cast(dict[str, Any] | None, sampling.extra_body.get("chat_template_kwargs")),
    )
    if len(ids) != completion.completion_tokens:
        return [
            f"server {server} counts {completion.completion_tokens} tokens in an answer that retokenizes to "
            f"{len(ids)}: rows like this one are kept and not trained on"
        ]
    return []


def _check_engine_ids(
    server: str,
    completion: Completion,
    token_ids: list[int],
    prompt_ids: list[int] | None,
    tokenizer: TargetTokenizer | None,
) -> list[str]:
    if len(token_ids) != completion.completion_tokens:
        raise Mismatch(
            f"server {server} gives {len(token_ids)} token ids and counts {completion.completion_tokens} tokens: its "
            "ids cannot be trusted. Turn off what changes them after generation, or update it."
        )
    if tokenizer is None or prompt_ids is None:
        return [f"target.path is not set: whether the model at {server} is the target cannot be checked"]
    if completion.prompt_token_ids is not None and completion.prompt_token_ids != prompt_ids:
        theirs, ours = completion.prompt_token_ids, prompt_ids
        raise Mismatch(_other_tokenizer(server, tokenizer, len(theirs), len(ours)))
    text = tokenizer.decode(token_ids)
    for name, part in (("reasoning", completion.reasoning), ("content", completion.content)):
        if part and part.strip() not in text:
            raise Mismatch(
                f"the ids of server {server} do not spell its {name} with the tokenizer of target.path = "
                f"{tokenizer.path!r}: name the model there that the server serves."
            )
    return []


def _other_tokenizer(server: str, tokenizer: TargetTokenizer, theirs: int, ours: int) -> str:
    return (
        f"server {server} reads the first prompt as {theirs} tokens, the tokenizer and chat template of target.path = "
        f"{tokenizer.path!r} make {ours} others of it: name the model there that the server serves, with the same chat "
        "template (vLLM: --chat-template)."
    )


def _check_timeout(server: str, sampling: Sampling, pace: float, timeout_s: float) -> list[str]:
    least = pace * sampling.max_tokens
    counted = f"{sampling.max_tokens} tokens at {pace:.3g} s each take {least:.0f} s at {server}"
    if timeout_s < least:
        raise Mismatch(
            f"worker.request_timeout_s = {timeout_s:g} would cut every long answer: {counted}, even when it has "
            f"nothing else to do. Set it to {least * HEADROOM:.0f} or more, or leave it out."
        )
    if timeout_s < least * HEADROOM:
        return [f"worker.request_timeout_s = {timeout_s:g} is near: {counted} when it has nothing else to do"]
    return []
