"""Ollama, where it is forced (`UNSUITABLE` says why it has to be): reasoning in `reasoning`, no ids, no gauges.

Read in its sources (`openai/openai.go`), not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.dialects import Ask, Request, asking, openai

NAME = "ollama"
GIVES_TOKEN_IDS = False
WANTS_PROMPT_IDS = False

REFUSED: dict[str, str] = dict.fromkeys(("top_k", "min_p", "repetition_penalty"), "Ollama's chat API ignores it")

continuation = openai.continuation
parse = openai.parse
classify = openai.classify


def request(ask: Ask) -> Request:
    """It has no switch of the template: thinking is off with an effort of "none", and else as the model likes."""
    asking.refuse(ask.sampling, REFUSED)
    effort = "none" if ask.sampling.thinking is False else ask.sampling.reasoning_effort
    body = asking.chat(ask, reasoning=("reasoning",)) | ({"reasoning_effort": effort} if effort else {})
    return Request(openai.CHAT, asking.merged(body, ask.sampling.extra_body))


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    """By the owner of its own models. One of somebody else's is known by the server's greeting (`detect`)."""
    return any(entry.get("owned_by") == "library" for entry in openai.model_entries(models))
