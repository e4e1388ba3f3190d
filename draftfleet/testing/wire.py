"""What each of the imitated servers says on the wire. The real answers stand in tests/contracts/dialects/."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from draftfleet.testing.answers import Answer
from draftfleet.testing.behaviour import Behaviour, Kind

HEADERS = {"vllm": {}, "openai": {}, "transformers": {"x-request-id": "fake"}}
_TOO_LONG = (
    "This model's maximum context length is {} tokens. However, you requested {} output tokens and your prompt "
    "contains at least {} input tokens. Please reduce the length of the input prompt or the number of requested "
    "output tokens."
)


def models(behaviour: Behaviour) -> dict[str, Any]:
    """GET /v1/models."""
    entry: dict[str, Any] = {"id": behaviour.model, "object": "model", "created": 0}
    if behaviour.shape == "vllm":
        entry |= {"owned_by": "vllm", "root": behaviour.model, "parent": None}
    elif behaviour.shape == "transformers":
        entry |= {"owned_by": "local", "status": {"value": "loaded"}}
    else:
        entry |= {"owned_by": "fake"}
    if behaviour.max_model_len is not None and behaviour.shape != "transformers":
        entry["max_model_len"] = behaviour.max_model_len
    return {"object": "list", "data": [entry]}


def metrics(behaviour: Behaviour, *, running: int, waiting: int, tokens: int) -> str:
    """GET /metrics of vLLM."""
    label = f'{{engine="0",model_name="{behaviour.model}"}}'
    values = {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": min(running / (behaviour.slots or 256), 1.0),
        "num_preemptions_total": 0,
        "generation_tokens_total": tokens,
    }
    return "".join(f"vllm:{name}{label} {float(value)}\n" for name, value in values.items())


def error(behaviour: Behaviour, status: int, message: str) -> dict[str, Any]:
    """The body of an answer that is not 200."""
    if behaviour.shape == "transformers":
        return {"detail": message}
    return {"error": {"message": message, "type": "FakeError", "param": None, "code": status}}


def refusal(behaviour: Behaviour, body: dict[str, Any], key: str | None) -> tuple[int, str] | None:
    """Status and message, where a healthy server refuses the request by itself. `key` is its bearer token."""
    if behaviour.api_key is not None and key != behaviour.api_key:
        return 401, "Unauthorized"
    if not behaviour.ready:
        return 503, "loading"
    model = body.get("model")
    if model != behaviour.model:
        if behaviour.shape == "transformers":
            return 400, f"Server is pinned to '{behaviour.model}'; requested '{model}'."
        return 404, f"The model `{model}` does not exist."
    if behaviour.shape == "transformers" and "return_token_ids" in body:
        return 422, "Unexpected fields in the request: {'return_token_ids'}"
    return None


def too_long(behaviour: Behaviour, body: dict[str, Any], answer: Answer) -> tuple[int, str] | None:
    """`transformers serve` has no limit of its own."""
    limit, asked, given = behaviour.max_model_len, body.get("max_tokens") or 1, len(answer.prompt_ids)
    if limit is None or behaviour.shape == "transformers" or given + asked <= limit:
        return None
    return 400, _TOO_LONG.format(limit, asked, given)


def completion(
    behaviour: Behaviour, answer: Answer, *, number: int, kind: Kind | None, with_ids: bool
) -> dict[str, Any]:
    """The body of an HTTP 200, spoiled as the fault `kind` says."""
    if kind == "no_reasoning":
        answer = replace(answer, reasoning=None, content=answer.content or "")
    choice: dict[str, Any] = {"index": 0, "message": _message(behaviour, answer, kind)}
    choice["finish_reason"] = "abort" if kind == "abort" else answer.finish_reason
    body: dict[str, Any] = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": int(time.time())}
    body |= {"model": behaviour.model, "choices": [choice]}
    if kind != "no_usage":
        prompt, completed = len(answer.prompt_ids), len(answer.token_ids)
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completed,
            "total_tokens": prompt + completed,
        }
    if behaviour.shape == "vllm" and with_ids and kind != "no_ids":
        body["prompt_token_ids"] = answer.prompt_ids
        choice["token_ids"] = answer.token_ids[:-1] if kind == "wrong_ids" else answer.token_ids
    return body


def _message(behaviour: Behaviour, answer: Answer, kind: Kind | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning and kind == "rename_reasoning":
        message["thoughts"] = answer.reasoning
    elif answer.reasoning and behaviour.shape == "openai":
        closed = f"\n</think>\n\n{answer.content}" if answer.content else ""
        message["content"] = f"<think>\n{answer.reasoning}{closed}"
    elif answer.reasoning:
        message["reasoning" if behaviour.shape == "vllm" else "reasoning_content"] = answer.reasoning
    if behaviour.shape == "transformers":
        message["content"] = message["content"] or ""
    return message
