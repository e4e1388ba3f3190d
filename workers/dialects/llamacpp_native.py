"""llama.cpp's own API, POST /completion: the prompt goes as ids that we made, and the answer's exact ids come back.

The server parses nothing: the thought is split off by us, and tool calls stay in the content, as the model wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.dialects import Ask, Completion, Request, asking, openai

NAME = "llamacpp-native"
GIVES_TOKEN_IDS = True
WANTS_PROMPT_IDS = True

COMPLETION = "/completion"
NAMES = {"repetition_penalty": "repeat_penalty"}
ENDS = {"eos": "stop", "word": "stop", "limit": "length"}

classify = openai.classify


def request(ask: Ask) -> Request:
    body: dict[str, Any] = {
        "model": ask.model,
        "prompt": asking.prompt_ids(ask, "llama.cpp"),
        "n_predict": ask.sampling.max_tokens,
        "return_tokens": True,
        **asking.renamed(asking.knobs(ask), NAMES),
    }
    extra = {name: value for name, value in ask.sampling.extra_body.items() if name not in asking.OF_CHAT_ALONE}
    return Request(COMPLETION, asking.merged(body, extra))


continuation = request


def parse(body: dict[str, Any]) -> Completion:
    try:
        finish_reason = ENDS.get(body["stop_type"])
        text = openai.text_or_none(body["content"])
    except (KeyError, TypeError):
        raise openai.no_completion(body) from None
    outcome = openai.outcome_of(finish_reason)
    reasoning, source, content = openai.split_reasoning({}, text or None)
    return Completion(
        model=str(body.get("model") or ""),
        outcome=outcome,
        finish_reason=str(finish_reason),
        reasoning=reasoning,
        reasoning_source=source,
        content=content,
        token_ids=openai.token_ids(body.get("tokens") or None),
        prompt_tokens=openai.count(body, "tokens_evaluated"),
        completion_tokens=openai.count(body, "tokens_predicted"),
    )


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    """Never: it is the same server as `llamacpp`, and a choice."""
    return False
