"""Token ids made from text where a server gives none: the canary checks what the worker then does, by one function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftfleet.records import Prompt
from draftfleet.settings import Sampling
from draftfleet.tokens import CLOSE, OPEN, TargetTokenizer
from workers.dialects import Completion, Dialect

OPENING_IDS = 16
"""The mark that opens a thought and the white space after it, however they are cut into tokens."""


def prompt_ids(tokenizer: TargetTokenizer, prompt: Prompt, sampling: Sampling) -> list[int]:
    """Of the prompt as the target's template renders it."""
    return tokenizer.prompt_ids(prompt.messages, prompt.tools, sampling.thinking, sampling.template_kwargs)


def retokenized(tokenizer: TargetTokenizer, prompt: Prompt, sampling: Sampling, completion: Completion) -> list[int]:
    """Of an answer, from its text; not always as many as the server counted."""
    return tokenizer.completion_ids(
        prompt.messages,
        reasoning=completion.reasoning,
        content=completion.content,
        tool_calls=completion.tool_calls,
        finish_reason=completion.finish_reason,
        completion_tokens=completion.completion_tokens,
        tools=prompt.tools,
        thinking=sampling.thinking,
        template_kwargs=sampling.template_kwargs,
    )


def read(
    dialect: Dialect, body: dict[str, Any], tokenizer: TargetTokenizer | None, asked_ids: list[int] | None
) -> Completion:
    """An answer, as its dialect reads it. Raises what `parse` does.

    Where we asked with ids, the prompt may have opened the thought, and the answer does not say so: then a text without
    the closing mark is all thought.
    """
    completion = dialect.parse(body)
    if asked_ids is None:
        return completion
    completion = replace(completion, prompt_token_ids=completion.prompt_token_ids or asked_ids)
    is_open = tokenizer is not None and tokenizer.decode(asked_ids[-OPENING_IDS:]).rstrip().endswith(OPEN)
    if is_open and CLOSE not in str(body.get("text") or body.get("content")):
        return replace(completion, reasoning=completion.content, reasoning_source="think_tags", content=None)
    return completion
