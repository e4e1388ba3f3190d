"""Token ids made from text where a server gives none: the canary checks what the worker then does, by one function."""

from __future__ import annotations

from draftfleet.records import Prompt
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer
from workers.dialects import Completion


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
