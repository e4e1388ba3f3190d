"""SGLang's own API, POST /generate: the prompt goes as ids that we made, and the exact ids of the answer come back.

Read in its sources (`srt/managers/io_struct.py`, `tokenizer_manager.py`), not run. The server parses nothing: the
thought is split off by us, and tool calls stay in the content, as the model wrote them. It takes no model name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.dialects import Ask, Completion, Request, asking, openai

NAME = "sglang-native"
GIVES_TOKEN_IDS = True
WANTS_PROMPT_IDS = True

GENERATE = "/generate"

classify = openai.classify


def request(ask: Ask) -> Request:
    """Of `extra_body`, keys of `sampling_params` win one by one; what only a chat request has is left out."""
    params: dict[str, Any] = {
        "max_new_tokens": ask.sampling.max_tokens,
        "skip_special_tokens": False,  # the marks of a thought are special tokens of some models
        "spaces_between_special_tokens": False,
        **with_all_tokens(asking.renamed(asking.knobs(ask), {"seed": "sampling_seed"})),
    }
    body = {"input_ids": asking.prompt_ids(ask, "SGLang"), "sampling_params": params}
    extra = {name: value for name, value in ask.sampling.extra_body.items() if name not in asking.OF_CHAT_ALONE}
    return Request(GENERATE, asking.merged(body, extra))


continuation = request


def parse(body: dict[str, Any]) -> Completion:
    try:
        meta: dict[str, Any] = body["meta_info"]
        reason = meta["finish_reason"]
        finish_reason = openai.text_or_none(reason["type"] if isinstance(reason, dict) else reason)
        text = str(openai.text_or_none(body["text"]) or "")
    except (KeyError, TypeError):
        raise openai.no_completion(body) from None
    outcome = openai.outcome_of(finish_reason)
    reasoning, source, content = openai.split_reasoning({}, text or None)
    return Completion(
        model="",
        outcome=outcome,
        finish_reason=str(finish_reason),
        reasoning=reasoning,
        reasoning_source=source,
        content=content,
        token_ids=openai.token_ids(body.get("output_ids")),
        prompt_tokens=openai.count(meta, "prompt_tokens"),
        completion_tokens=openai.count(meta, "completion_tokens"),
    )


def with_all_tokens(knobs: dict[str, Any]) -> dict[str, Any]:
    """`top_k` of all tokens is 0 elsewhere and -1 here."""
    return {**knobs, "top_k": -1} if knobs.get("top_k") == 0 else knobs


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    """Never: it is the same server as `sglang`, and a choice."""
    return False
