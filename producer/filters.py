"""Which prompts are wanted: by language, by length, by a pattern. Each one that is not is counted under why."""

from __future__ import annotations

import re
from collections.abc import Callable

from draftfleet import settings
from draftfleet.records import Prompt
from producer.messages import text_of
from producer.prompts import Rules, language_of, last_user_text
from producer.shapes import Filtered, Row, short

CountTokens = Callable[[Prompt], int]
"""The length of a prompt in tokens of the target's template. Raises Rejected where the template refuses it."""


class Filters:
    """Those of one source."""

    def __init__(self, source: settings.Source, rules: Rules, count_tokens: CountTokens | None) -> None:
        self._source = source
        self._rules = rules
        self._languages = {name.strip().casefold() for name in source.languages or ()}
        self._keep = re.compile(source.keep) if source.keep else None
        self._drop = re.compile(source.drop) if source.drop else None
        self._count_tokens = count_tokens if source.min_prompt_tokens or source.max_prompt_tokens else None

    def check(self, row: Row, prompt: Prompt) -> None:
        """Raises Filtered where it is not wanted. What costs most comes last."""
        if self._languages and (language := language_of(row, self._rules)) not in self._languages:
            raise Filtered("filtered: language", f"it is {short(language)}" if language else "it names no language")
        self._check_length(prompt)
        self._check_patterns(prompt)
        if self._count_tokens is not None:
            _within(
                self._count_tokens(prompt), self._source.min_prompt_tokens, self._source.max_prompt_tokens, "tokens"
            )

    def _check_length(self, prompt: Prompt) -> None:
        shortest, longest = self._source.min_prompt_chars, self._source.max_prompt_chars
        if shortest or longest:
            chars = sum(len(text_of(message["content"])) for message in prompt.messages)
            _within(chars, shortest, longest, "characters")

    def _check_patterns(self, prompt: Prompt) -> None:
        if self._keep is None and self._drop is None:
            return
        texts = [last_user_text(prompt.messages)]
        if self._source.match == "any":
            texts = [text_of(message["content"]) for message in prompt.messages if message["role"] == "user"]
        if self._keep is not None and not any(map(self._keep.search, texts)):
            raise Filtered("filtered: keep", "the pattern to keep is not found")
        if self._drop is not None and any(map(self._drop.search, texts)):
            raise Filtered("filtered: drop", "the pattern to drop is found")


def _within(length: int, shortest: int | None, longest: int | None, unit: str) -> None:
    if shortest and length < shortest:
        raise Filtered("filtered: too short", f"{length} {unit}, the shortest is {shortest}")
    if longest and length > longest:
        raise Filtered("filtered: too long", f"{length} {unit}, the longest is {longest}")
