"""`transformers serve`: reasoning in `reasoning_content`, no token ids, no gauges, fields it does not know are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.dialects import openai
from workers.dialects.openai import classify as classify
from workers.dialects.openai import parse as parse
from workers.dialects.openai import request as request

NAME = "transformers"
GIVES_TOKEN_IDS = False


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    """It alone says of each model whether it is loaded, as `"status": {"value": "loaded"}`, and names no engine."""
    return any(
        isinstance(entry.get("status"), dict) and entry.get("owned_by") != "llamacpp"
        for entry in openai.model_entries(models)
    )
