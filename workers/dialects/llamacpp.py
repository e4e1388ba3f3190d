"""llama.cpp's server: reasoning in `reasoning_content`, both ways; no ids in chat; gauges with `--metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.dialects import Ask, Completion, Request, asking, llamacpp_native, openai

NAME = "llamacpp"
GIVES_TOKEN_IDS = False
WANTS_PROMPT_IDS = False

classify = openai.classify
continuation = llamacpp_native.request


def request(ask: Ask) -> Request:
    body = asking.renamed(asking.chat(ask), llamacpp_native.NAMES)
    kwargs = ask.sampling.template_kwargs
    body |= {"chat_template_kwargs": kwargs} if kwargs else {}
    return Request(openai.CHAT, asking.merged(body, ask.sampling.extra_body))


def parse(body: dict[str, Any]) -> Completion:
    if "stop_type" in body:
        return llamacpp_native.parse(body)
    completion = openai.parse(body)
    # It strips the line break after the opening mark and leaves the one before the closing mark.
    reasoning = completion.reasoning.strip("\n") or None if completion.reasoning else None
    return replace(completion, reasoning=reasoning)


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    return any(entry.get("owned_by") == "llamacpp" for entry in openai.model_entries(models))
