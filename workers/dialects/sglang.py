"""SGLang's chat API: reasoning in `reasoning_content`, both ways; ids on request in versions since July 2026.

Read in its sources (`srt/entrypoints/openai/protocol.py`), not run. Ids stand in the choice: `prompt_token_ids` with
`response_token_ids` (0.5.23) or `token_ids`. Older versions ignore the request for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.dialects import Ask, Completion, Request, asking, openai, sglang_native, vllm

NAME = "sglang"
GIVES_TOKEN_IDS = True
WANTS_PROMPT_IDS = False

classify = openai.classify
continuation = sglang_native.request


def request(ask: Ask) -> Request:
    body = {"return_token_ids": True, **sglang_native.with_all_tokens(asking.chat(ask))}
    return Request(openai.CHAT, asking.merged(vllm.switched(body, ask), ask.sampling.extra_body))


def parse(body: dict[str, Any]) -> Completion:
    if "meta_info" in body:
        return sglang_native.parse(body)
    completion = openai.parse(body)
    choice = body["choices"][0]
    ids = choice.get("token_ids") or choice.get("response_token_ids")
    prompt = openai.token_ids(choice.get("prompt_token_ids"))
    return replace(completion, prompt_token_ids=prompt, token_ids=openai.token_ids(ids))


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    return "\nsglang:" in f"\n{metrics}" or any(
        entry.get("owned_by") == "sglang" for entry in openai.model_entries(models)
    )
