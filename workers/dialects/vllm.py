"""vLLM: exact token ids on request, reasoning in `reasoning` (`reasoning_content` before 0.16), gauges at /metrics."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from draftfleet.errors import Transient
from workers.dialects import Ask, Completion, Request, openai

NAME = "vllm"
GIVES_TOKEN_IDS = True
WANTS_PROMPT_IDS = False

classify = openai.classify
continuation = openai.continuation


def request(ask: Ask) -> Request:
    path, body = openai.request(ask)
    return Request(path, {"return_token_ids": True} | body)


def parse(body: dict[str, Any]) -> Completion:
    completion = openai.parse(body)
    choice = body["choices"][0]
    return replace(
        completion, prompt_token_ids=_ids(body.get("prompt_token_ids")), token_ids=_ids(choice.get("token_ids"))
    )


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    return "\nvllm:" in f"\n{metrics}" or any(entry.get("owned_by") == "vllm" for entry in openai.model_entries(models))


def _ids(value: object) -> list[int] | None:
    """None where the server gives none."""
    if not isinstance(value, list):
        return None
    try:
        array("i", cast(list[int], value))  # fits the column of a shard; at the speed of C
    except (TypeError, OverflowError) as error:
        raise Transient(f"the server answered 200 with token ids that are none: {error}.") from None
    return cast(list[int], value)
