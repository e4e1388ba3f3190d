"""Any server with an OpenAI-compatible chat API, and what the other dialects have in common with it."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

from draftfleet.errors import BadRequest, Mismatch, Overload, ServerError, Transient, Unauthorized
from draftfleet.records import Outcome
from workers.dialects import Ask, Completion, Request, asking, start_of

NAME = "openai"
GIVES_TOKEN_IDS = False
WANTS_PROMPT_IDS = False

CHAT = "/v1/chat/completions"

REASONING_FIELDS = ("reasoning", "reasoning_content")
COMPLETE = {"stop", "tool_calls", "function_call"}
BROKEN_OFF = {"abort", "error", "cancelled"}
OVERLOADED = {429, 503, 529}
TIMED_OUT = {408, 425}
MOST_TOKENS = 2**31 - 1
"""What a column of a shard can hold."""
_NO_SUCH_MODEL = re.compile(r"model\b.*\b(does not exist|not found)|no such model|server is pinned to", re.I | re.S)


def request(ask: Ask) -> Request:
    """Knobs that OpenAI's API does not have, such as `top_k`, are sent under vLLM's names: most servers take them."""
    body, sampling = asking.chat(ask), ask.sampling
    if sampling.reasoning_effort is not None:
        body["reasoning_effort"] = sampling.reasoning_effort
    if sampling.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": sampling.thinking}
    return Request(CHAT, asking.merged(body, sampling.extra_body))


def continuation(ask: Ask) -> Request | None:
    return None


def parse(body: dict[str, Any]) -> Completion:
    """A chat completion, or a completion of text."""
    try:
        choice = body["choices"][0]
        is_text = "message" not in choice and isinstance(choice.get("text"), str)
        message: dict[str, Any] = {"content": choice["text"]} if is_text else choice["message"]
        finish_reason = choice.get("finish_reason")
        usage: dict[str, Any] = body.get("usage") or {}
        content = text_or_none(message.get("content"))
        tool_calls: list[dict[str, Any]] | None = message.get("tool_calls") or None
        model = str(body.get("model") or "")
        outcome = outcome_of(text_or_none(finish_reason))
    except (KeyError, IndexError, TypeError, AttributeError):
        raise no_completion(body) from None
    reasoning, source, content = split_reasoning(message, content)
    return Completion(
        model=model,
        outcome=outcome,
        finish_reason=str(finish_reason),
        reasoning=reasoning,
        reasoning_source=source,
        content=content,
        tool_calls=tool_calls,
        prompt_tokens=count(usage, "prompt_tokens"),
        completion_tokens=count(usage, "completion_tokens"),
    )


def no_completion(body: object) -> Transient:
    shown = start_of(json.dumps(body, ensure_ascii=False))
    return Transient(
        "the server answered 200 with a body that is no chat completion", status=200, body=shown, kind="unusable"
    )


def outcome_of(finish_reason: str | None) -> Outcome:
    """`length`, and any reason we do not know, is truncated: the answer ended before the model ended it."""
    if finish_reason is None or finish_reason in BROKEN_OFF:
        raise Transient(f"the server broke the answer off: finish_reason = {finish_reason!r}.")
    return "ok" if finish_reason in COMPLETE else "truncated"


def split_reasoning(message: Mapping[str, Any], content: str | None) -> tuple[str | None, str | None, str | None]:
    """Reasoning, where it stood, and the content without it.

    A `</think>` without its opening counts too: some templates write the opening into the prompt.
    """
    for field in REASONING_FIELDS:
        text = message.get(field)
        if isinstance(text, str) and text:
            return text, field, content
    if not content or ("</think>" not in content and not content.lstrip().startswith("<think>")):
        return None, None, content
    thought, closed, rest = content.partition("</think>")
    thought = thought.lstrip().removeprefix("<think>").strip("\n")
    answer = rest.lstrip("\n") if closed else None
    return (thought, "think_tags", answer) if thought else (None, None, answer)


def classify(status: int, headers: Mapping[str, str], body: str | bytes) -> ServerError:
    text = start_of(body)
    said = f"the server answered {status}"
    if status in (401, 403):
        hint = "set worker.api_key, or worker.api_keys for single servers, to a key that it accepts. It said"
        return Unauthorized(f"{said}: {hint}", body=text)
    if status in OVERLOADED:
        return Overload(said, status=status, retry_after_s=retry_after_s(headers), body=text)
    if status in TIMED_OUT or status >= 500 or status < 400:
        return Transient(said, status=status, body=text)
    if status in (400, 404) and _NO_SUCH_MODEL.search(text):
        hint = "it does not serve the model of this run: start it with that model. It said"
        return Mismatch(f"{said}: {hint}", body=text)
    return BadRequest(said, status=status, body=text)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Retry-After as seconds from now: it comes as seconds or as an HTTP date. None if absent or unreadable."""
    value = next((value for key, value in headers.items() if key.lower() == "retry-after"), "").strip()
    try:
        seconds = float(value)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    """Any server that lists models."""
    return bool(model_entries(models))


def model_entries(models: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of a /v1/models body; none if it is no such body."""
    data = models.get("data")
    if not isinstance(data, list):
        return []
    entries = cast(list[object], data)
    return [cast(dict[str, Any], entry) for entry in entries if isinstance(entry, dict) and "id" in entry]


def context_tokens(entry: Mapping[str, Any]) -> int | None:
    """The longest prompt + completion that a model's entry in /v1/models tells: vLLM and SGLang as `max_model_len`,
    llama.cpp as `meta.n_ctx`."""
    meta: object = entry.get("meta")
    said = (entry.get("max_model_len"), cast(dict[str, Any], meta).get("n_ctx") if isinstance(meta, dict) else None)
    return next((tokens for tokens in said if isinstance(tokens, int) and tokens > 0), None)


def text_or_none(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def count(usage: Mapping[str, Any], key: str) -> int:
    """-1 where it is not given."""
    value = usage.get(key)
    return value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else -1


def token_ids(value: object) -> list[int] | None:
    """None where the server gives none. Raises Transient on what is no list of ids."""
    if not isinstance(value, list):
        return None
    try:
        array("i", cast(list[int], value))  # fits the column of a shard; at the speed of C
    except (TypeError, OverflowError) as error:
        raise Transient(f"the server answered 200 with token ids that are none: {error}.") from None
    return cast(list[int], value)
