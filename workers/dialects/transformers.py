"""`transformers serve`: reasoning in `reasoning_content`, no token ids, no gauges; unknown request fields get a 422."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.dialects import Completion, openai

NAME = "transformers"
GIVES_TOKEN_IDS = False
WANTS_PROMPT_IDS = False

request = openai.request
continuation = openai.continuation
classify = openai.classify

STOP_TOKENS = re.compile(r"\s*(<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>)+\s*$")
"""Stand as text at the end of a thought that the model ended its answer in (transformers 5.24)."""


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
