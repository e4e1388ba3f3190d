"""vLLM 0.10 to 0.33: exact token ids on request, reasoning in `reasoning` (`reasoning_content` before 0.16), gauges.

Which version answers need not be known. In answers either name of the reasoning is read; in the history both are sent,
since 0.16 to 0.21 read only `reasoning` and others take either for the other (vllm-project/vllm #27752, #33402).
`return_token_ids` is ignored before 0.10.2 (#22587): then ids come from the target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.dialects import Ask, Completion, Request, asking, openai

NAME = "vllm"
GIVES_TOKEN_IDS = True
WANTS_PROMPT_IDS = False

COMPLETIONS = "/v1/completions"

classify = openai.classify


def request(ask: Ask) -> Request:
    body = {"return_token_ids": True, **asking.chat(ask, reasoning=("reasoning", "reasoning_content"))}
    return Request(openai.CHAT, asking.merged(switched(body, ask), ask.sampling.extra_body))


def switched(body: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """With the switches of the template. Models without one, such as gpt-oss, take the effort from its own field."""
    effort, kwargs = ask.sampling.reasoning_effort, ask.sampling.template_kwargs
    body |= {"reasoning_effort": effort} if effort is not None else {}
    return body | ({"chat_template_kwargs": kwargs} if kwargs else {})


def continuation(ask: Ask) -> Request | None:
    body: dict[str, Any] = {
        "model": ask.model,
        "prompt": asking.prompt_ids(ask, "vLLM"),
        "max_tokens": ask.sampling.max_tokens,
        "return_token_ids": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,  # the marks of a thought are special tokens of some models
    }
    extra = {name: value for name, value in ask.sampling.extra_body.items() if name not in asking.OF_CHAT_ALONE}
    return Request(COMPLETIONS, asking.merged(body | asking.knobs(ask), extra))


def parse(body: dict[str, Any]) -> Completion:
    """In a completion of text, the prompt's ids stand in the choice."""
    completion = openai.parse(body)
    choice = body["choices"][0]
    prompt = openai.token_ids(body.get("prompt_token_ids") or choice.get("prompt_token_ids"))
    return replace(completion, prompt_token_ids=prompt, token_ids=openai.token_ids(choice.get("token_ids")))


def recognizes(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
    return "\nvllm:" in f"\n{metrics}" or any(entry.get("owned_by") == "vllm" for entry in openai.model_entries(models))
