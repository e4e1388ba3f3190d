"""What each imitated server says on the wire; tests/contracts/dialects/ has the real answers of those that were run.

The shapes of SGLang, Ollama and vLLM 0.10 are read from their sources (docs/fake-server.md says which).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from draftfleet.testing.answers import Answer, Ids
from draftfleet.testing.behaviour import Behaviour, Kind, Shape

HEADERS: dict[Shape, dict[str, str]] = {
    "vllm": {"Server": "uvicorn"},
    "vllm-0.10": {"Server": "uvicorn"},
    "sglang": {"Server": "uvicorn"},
    "llamacpp": {"Server": "llama.cpp"},
    "transformers": {"Server": "uvicorn", "x-request-id": "fake"},
    "ollama": {},
    "openai": {"Server": "uvicorn"},
}
OWNERS: dict[Shape, str] = {
    "vllm": "vllm",
    "vllm-0.10": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "transformers": "local",
    "ollama": "library",
    "openai": "fake",
}
GIVES_IDS = ("vllm", "sglang")
ASKS_NO_NAME = ("sglang", "llamacpp")
"""They serve their one model under whatever name a request has. SGLang gives that name back."""
VERSIONS: dict[Shape, str] = {"vllm": "0.33.0", "vllm-0.10": "0.10.0"}
UNKNOWN_TO_TRANSFORMERS = ("return_token_ids", "top_k", "min_p", "repetition_penalty")

_TOO_LONG = (
    "This model's maximum context length is {limit} tokens. However, you requested {asked} output tokens and your "
    "prompt contains at least {given} input tokens. Please reduce the length of the input prompt or the number of "
    "requested output tokens."
)
_TOO_LONG_FOR_SGLANG = (
    "Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total of "
    "{total} tokens: {given} tokens from the input messages and {asked} tokens for the completion."
)
_TOO_LONG_FOR_LLAMACPP = "request ({given} tokens) exceeds the available context size ({limit} tokens)"
_LLAMACPP_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    503: "unavailable_error",
}


def models(behaviour: Behaviour) -> dict[str, Any]:
    """GET /v1/models."""
    name, limit = behaviour.model, behaviour.max_model_len
    entry: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": OWNERS[behaviour.shape]}
    match behaviour.shape:
        case "vllm" | "vllm-0.10":
            entry |= {"root": name, "parent": None}
        case "sglang":
            entry |= {"root": name}
        case "llamacpp":
            entry |= {"meta": {"vocab_type": 2, "n_ctx": limit or 32_768, "n_ctx_train": 32_768}}
        case "transformers":
            entry |= {"status": {"value": "loaded"}}
        case "openai" | "ollama":
            pass
    if limit is not None and behaviour.shape not in ("transformers", "llamacpp", "ollama"):
        entry["max_model_len"] = limit
    return {"object": "list", "data": [entry]}


def error(behaviour: Behaviour, status: int, message: str, **more: Any) -> dict[str, Any]:
    """The body of an answer that is not 200."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    match behaviour.shape:
        case "transformers":
            return {"detail": message}
        case "sglang":
            return {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        case "llamacpp":
            kind = _LLAMACPP_TYPES.get(status, "server_error")
            return {"error": {"code": status, "message": message, "type": kind} | more}
        case _:
            return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def refusal(behaviour: Behaviour, body: dict[str, Any], key: str | None) -> tuple[int, str] | None:
    """Status and message, where a healthy server refuses the request by itself. `key` is its bearer token."""
    if behaviour.api_key is not None and key != behaviour.api_key:
        return 401, "Unauthorized"
    model = body.get("model")
    if model != behaviour.model and behaviour.shape not in ASKS_NO_NAME:
        if behaviour.shape == "transformers":
            return 400, f"Server is pinned to '{behaviour.model}'; requested '{model}'."
        if behaviour.shape == "ollama":
            return 404, f"model '{model}' not found"
        return 404, f"The model `{model}` does not exist."
    if behaviour.shape == "transformers" and (unknown := {*UNKNOWN_TO_TRANSFORMERS} & body.keys()):
        return 422, f"Unexpected fields in the request: {unknown}"
    return None


def too_long(behaviour: Behaviour, body: dict[str, Any], answer: Answer) -> tuple[int, str, dict[str, Any]] | None:
    """Status, message and further fields of the error.

    `transformers serve` has no limit of its own, and Ollama drops what is too much.
    """
    limit, asked, given = behaviour.max_model_len, body.get("max_tokens") or 1, answer.prompt_ids.count
    if limit is None or behaviour.shape in ("transformers", "ollama"):
        return None
    if behaviour.shape == "llamacpp":  # it cuts the answer where its context ends
        if given < limit:
            return None
        more = {"type": "exceed_context_size_error", "n_prompt_tokens": given, "n_ctx": limit}
        return 400, _TOO_LONG_FOR_LLAMACPP.format(given=given, limit=limit), more
    if given + asked < limit + (behaviour.shape != "sglang"):  # SGLang wants one token of room
        return None
    text = _TOO_LONG_FOR_SGLANG if behaviour.shape == "sglang" else _TOO_LONG
    return 400, text.format(limit=limit, asked=asked, given=given, total=given + asked), {}


def completion(behaviour: Behaviour, asked: dict[str, Any], answer: Answer, *, number: int, kind: Kind | None) -> bytes:
    """The body of an HTTP 200 to the request `asked`, spoiled as the fault `kind` says."""
    shape = behaviour.shape
    if kind == "no_reasoning":
        answer = replace(answer, reasoning=None, content=answer.content or "")
    choice: dict[str, Any] = {"index": 0, "message": _message(shape, answer, kind)}
    choice["finish_reason"] = "abort" if kind == "abort" else answer.finish_reason
    if shape == "sglang":
        choice["matched_stop"] = 3 if answer.finish_reason == "stop" else None
    body: dict[str, Any] = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": int(time.time())}
    body["model"] = str(asked.get("model")) if shape == "sglang" else behaviour.model
    if shape == "llamacpp":
        body["system_fingerprint"] = "b0-fake"
    if kind != "no_usage":
        prompt, completed = answer.prompt_ids.count, answer.token_ids.count
        if shape == "ollama":
            prompt = min(prompt, behaviour.max_model_len or prompt)
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completed,
            "total_tokens": prompt + completed,
        }
    with_ids = shape in GIVES_IDS and asked.get("return_token_ids") and kind != "no_ids"
    of_choice: dict[str, Ids] = {}
    of_body: dict[str, Ids] = {}
    if with_ids:
        ids = answer.token_ids.without_last() if kind == "wrong_ids" else answer.token_ids
        if shape == "sglang":
            of_choice = {"prompt_token_ids": answer.prompt_ids, "response_token_ids": ids}
        else:
            of_choice, of_body = {"token_ids": ids}, {"prompt_token_ids": answer.prompt_ids}
    return _joined(_joined(body, of_body), {"choices": Ids(_joined(choice, of_choice), 1)}).encode()


def _joined(fields: dict[str, Any] | str, lists: dict[str, Ids]) -> str:
    """JSON of an object with further fields whose values are lists that are JSON already."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    return text[:-1] + "".join(f', "{name}": [{ids.text}]' for name, ids in lists.items()) + "}"


def _message(shape: Shape, answer: Answer, kind: Kind | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning and kind == "rename_reasoning":
        message["thoughts"] = answer.reasoning
    elif answer.reasoning and shape == "openai":
        closed = f"\n</think>\n\n{answer.content}" if answer.content else ""
        message["content"] = f"<think>\n{answer.reasoning}{closed}"
    elif answer.reasoning:
        message["reasoning" if shape in ("vllm", "ollama") else "reasoning_content"] = answer.reasoning
    if shape == "sglang":
        message |= {"reasoning_content": message.get("reasoning_content"), "tool_calls": None}
    if shape in ("transformers", "llamacpp"):
        message["content"] = message["content"] or ""
    return message
