"""`transformers serve`: reasoning in `reasoning_content`, no token ids, no gauges; unknown request fields get a 422."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.dialects import Completion, openai

NAME = "transformers"
GIVES_TOKEN_IDS = False

request = openai.request
classify = openai.classify


def parse(body: dict[str, Any]) -> Completion:
    completion = openai.parse(body)
    # It names a hub model with its revision, which the request need not have.
    return replace(completion, model=completion.model.removesuffix("@main"))


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    """It says of each model whether it is loaded, as `"status": {"value": "loaded"}`. So does a llama.cpp router."""
    return any(
        isinstance(entry.get("status"), dict) and entry.get("owned_by") != "llamacpp"
        for entry in openai.model_entries(models)
    )
