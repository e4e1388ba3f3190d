"""The length of a prompt in tokens of the target's template, where prompts are chosen by it."""

from __future__ import annotations

from pathlib import Path

from draftfleet import tokens
from draftfleet.errors import SettingsError
from draftfleet.records import Prompt
from draftfleet.settings import Settings
from producer.chosen import chosen, counts_tokens
from producer.filters import CountTokens
from producer.shapes import Rejected


def token_counter(settings: Settings) -> CountTokens | None:
    """None where no knob asks for it. Raises SettingsError or TargetError where it cannot be had."""
    if not counts_tokens(chosen(settings.producer)):
        return None
    if not settings.target.path:
        raise SettingsError(
            "producer.min_prompt_tokens and producer.max_prompt_tokens need target.path: name the folder that holds "
            "the target's tokenizer.json, or its name on the hub. Or choose by characters: producer.max_prompt_chars."
        )
    tokenizer = tokens.load(Path(settings.target.path).expanduser())
    sampling = settings.sampling
    template_kwargs = sampling.extra_body.get("chat_template_kwargs")

    def count(prompt: Prompt) -> int:
        try:
            return len(tokenizer.prompt_ids(prompt.messages, prompt.tools, sampling.thinking, template_kwargs))
        except Exception as error:  # a template is a program: it raises what it likes, and one row ends nothing
            raise Rejected("not rendered", f"the target's template refuses it: {error}") from None

    return count
