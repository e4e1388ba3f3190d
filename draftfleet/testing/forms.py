"""The APIs of the imitated servers beside chat: a prompt of token ids goes in, and the text comes out as it was made.

A request is read as what a chat request says (`model`, `max_tokens`, `return_token_ids`), with `ids` for its messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftfleet.testing.answers import Answer, Ids
from draftfleet.testing.behaviour import Behaviour, Kind, Shape

Name = Literal["text", "generate", "completion"]


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, as it is to be written. `is_counted` unless the fault `no_usage` struck."""

    answer: Answer
    text: str
    end: str
    number: int
    is_counted: bool


@dataclass(frozen=True, slots=True)
class Form:
    """`read` raises KeyError, TypeError or ValueError on a request that is none; `write` leaves the ids out.

    `ids` says under which names they stand: at the top, or `in_choice` of the one choice.
    """

    path: str
    shapes: tuple[Shape, ...]
    read: Callable[[dict[str, Any]], dict[str, Any]]
    write: Callable[[Behaviour, Said], dict[str, Any]]
    ids: Callable[[Answer, Ids], dict[str, Ids]]
    in_choice: bool = False


def body(form: Form, behaviour: Behaviour, asked: dict[str, Any], said: Said, kind: Kind | None) -> bytes:
    """The body of an HTTP 200, spoiled as the fault `kind` says."""
    answer = said.answer
    if kind == "no_reasoning":
        said = replace(said, text=said.text.rpartition("</think>")[2].lstrip())
    if kind == "abort":
        said = replace(said, end="abort")
    fields = form.write(behaviour, replace(said, is_counted=kind != "no_usage"))
    ids: dict[str, Ids] = {}
    if asked.get("return_token_ids") and kind != "no_ids":
        ids = form.ids(answer, answer.token_ids.without_last() if kind == "wrong_ids" else answer.token_ids)
    (fields["choices"][0] if form.in_choice else fields).update({name: of.numbers() for name, of in ids.items()})
    return json.dumps(fields).encode()


def _numbers(prompt: object) -> list[int]:
    if not isinstance(prompt, list) or not prompt or not all(isinstance(one, int) for one in prompt):
        raise ValueError("a fake server takes a prompt of token ids alone")
    return prompt


def _read_text(asked: dict[str, Any]) -> dict[str, Any]:
    most = asked.get("max_tokens") or 16
    return {
        "model": asked.get("model"),
        "ids": _numbers(asked["prompt"]),
        "max_tokens": most,
        "return_token_ids": asked.get("return_token_ids"),
    }


def _write_text(behaviour: Behaviour, said: Said) -> dict[str, Any]:
    choice = {"index": 0, "text": said.text, "logprobs": None, "finish_reason": said.end}
    fields = {"id": f"cmpl-{said.number}", "object": "text_completion", "created": int(time.time())}
    prompt, made = said.answer.prompt_ids.count, said.answer.token_ids.count
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return {**fields, "model": behaviour.model, "choices": [choice], "usage": usage if said.is_counted else None}


def _read_generate(asked: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = asked.get("sampling_params") or {}
    most = params.get("max_new_tokens") or 128
    ids = _numbers(asked["input_ids"])
    return {"model": None, "ids": ids, "max_tokens": most, "return_token_ids": True, "stream": asked.get("stream")}


def _write_generate(behaviour: Behaviour, said: Said) -> dict[str, Any]:
    details = {
        "stop": {"matched": 3},
        "length": {"length": said.answer.token_ids.count},
        "abort": {"message": "Aborted"},
    }
    meta: dict[str, Any] = {"id": str(said.number), "finish_reason": {"type": said.end, **details.get(said.end, {})}}
    if said.is_counted:
        meta |= {"prompt_tokens": said.answer.prompt_ids.count, "completion_tokens": said.answer.token_ids.count}
    return {"text": said.text, "meta_info": {**meta, "cached_tokens": 0}}


def _read_completion(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": asked.get("model"),
        "ids": _numbers(asked["prompt"]),
        "max_tokens": max(asked.get("n_predict") or 0, 0) or None,
        "return_token_ids": asked.get("return_tokens"),
    }


def _write_completion(behaviour: Behaviour, said: Said) -> dict[str, Any]:
    types = {"stop": "eos", "length": "limit"}
    fields: dict[str, Any] = {"index": 0, "content": said.text, "stop": True, "model": behaviour.model}
    if said.is_counted:
        fields |= {"tokens_predicted": said.answer.token_ids.count, "tokens_evaluated": said.answer.prompt_ids.count}
    return fields | {"stop_type": types.get(said.end, "none"), "stopping_word": "", "truncated": False}


FORMS: dict[Name, Form] = {
    "text": Form(
        path="/v1/completions",
        shapes=("vllm", "vllm-0.10"),
        read=_read_text,
        write=_write_text,
        ids=lambda answer, ids: {"token_ids": ids, "prompt_token_ids": answer.prompt_ids},
        in_choice=True,
    ),
    "generate": Form(
        path="/generate",
        shapes=("sglang",),
        read=_read_generate,
        write=_write_generate,
        ids=lambda answer, ids: {"output_ids": ids},
    ),
    "completion": Form(
        path="/completion",
        shapes=("llamacpp",),
        read=_read_completion,
        write=_write_completion,
        ids=lambda answer, ids: {"tokens": ids},
    ),
}
