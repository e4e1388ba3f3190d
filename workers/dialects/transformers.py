"""`transformers serve`: reasoning in `reasoning_content`, no token ids, no gauges; unknown request fields get a 422.

What it would drop or mistake without a word is refused (`REFUSED`, seen on 5.24). It drops the reasoning of earlier
turns too: that is written into the content, between the marks that templates of thinking models take apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.dialects import Ask, Completion, Request, asking, openai

NAME = "transformers"
GIVES_TOKEN_IDS = False
WANTS_PROMPT_IDS = False

classify = openai.classify
continuation = openai.continuation

REFUSED = {
    "top_k": "transformers serve does not take it",
    "min_p": "transformers serve does not take it",
    "repetition_penalty": "transformers serve does not take it",
    "presence_penalty": "transformers serve takes it and ignores it",
    "frequency_penalty": "transformers serve takes it for a repetition penalty of 1 more",
    "stop": "transformers serve ignores it with --continuous-batching, which it does not tell",
}

STOP_TOKENS = re.compile(r"\s*(<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>)+\s*$")
"""Stand as text at the end of a thought that the model ended its answer in (transformers 5.24)."""


def request(ask: Ask) -> Request:
    asking.refuse(ask.sampling, REFUSED)
    body = asking.chat(ask)
    body["messages"] = [_with_thought(message) for message in body["messages"]]
    kwargs = ask.sampling.template_kwargs
    body |= {"chat_template_kwargs": kwargs} if kwargs else {}
    return Request(openai.CHAT, asking.merged(body, ask.sampling.extra_body))


def parse(body: dict[str, Any]) -> Completion:
    completion = openai.parse(body)
    reasoning = STOP_TOKENS.sub("", completion.reasoning) if completion.reasoning else None
    # It names a hub model with its revision, which the request need not have.
    return replace(completion, reasoning=reasoning, model=completion.model.removesuffix("@main"))


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    """It says of each model whether it is loaded, as `"status": {"value": "loaded"}`. So does a llama.cpp router."""
    return any(
        isinstance(entry.get("status"), dict) and entry.get("owned_by") != "llamacpp"
        for entry in openai.model_entries(models)
    )


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    thought = message.pop("reasoning_content", None)
    if not thought or message.get("tool_calls"):  # beside tool calls it drops the content as well
        return message
    return {**message, "content": f"<think>\n{thought.strip()}\n</think>\n\n{str(message['content']).lstrip()}"}
