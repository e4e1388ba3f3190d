"""How long the prompts are, in tokens of the target's template: of all of them, or of a sample drawn by hash.

A prompt belongs to the sample if the end of its id is among the smallest of all: whatever the order of the data set,
the same prompts are drawn, from its beginning as from its end. (The beginning of the id decides the split.) Texts wait
in memory only until there are enough of them to be tokenized at once; then their lengths stay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from draftfleet.records import Prompt
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer

WAITING_CHARS = 48_000_000
"""Characters of prompts that may wait to be tokenized: those of 20,000 prompts of 2 kB, of which many are not drawn in
the end, and need no tokens."""

AT_ONCE = 256
"""Texts that are tokenized together."""

UNRENDERABLE = Exception
"""What a chat template answers to a conversation that it was not made for. It is a program and raises what it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Prompts of `least` to `most` tokens."""

    least: int
    most: int
    prompts: int


@dataclass(slots=True, kw_only=True)
class Lengths:
    """Of `measured` prompts out of `of` distinct ones. `unit` is "tokens", or "characters" without a tokenizer.

    `too_long` prompts fill the context by themselves: they fail. For `cut` ones the context leaves less than
    sampling.max_tokens. Both are None where no context is known. `unrenderable` ones are refused by the chat template.
    """

    unit: str
    measured: int = 0
    of: int = 0
    mean: float = 0.0
    least: int = 0
    median: int = 0
    p90: int = 0
    p99: int = 0
    most: int = 0
    longest: str = ""
    histogram: list[Bar] = field(default_factory=list[Bar])
    context_tokens: int | None = None
    max_tokens: int = 0
    too_long: int | None = None
    cut: int | None = None
    unrenderable: int = 0
    unrenderable_example: str = ""
    mean_by_source: dict[str, float] = field(default_factory=dict[str, float])

    def stand_for(self, count: int) -> str:
        """How many of all prompts so many of the measured ones stand for, as text."""
        if self.measured == self.of:
            return f"{count:,}"
        return f"about {round(count * self.of / self.measured):,}"


@dataclass(slots=True)
class _Drawn:
    rank: int
    source: str
    prompt_id: str
    prompt: Prompt | None
    length: int | None = None
    fault: str = ""


class Ruler:
    """Is told of every prompt, and measures `most_prompts` of them; 0: all."""

    def __init__(
        self, tokenizer: TargetTokenizer | None, sampling: Sampling, context_tokens: int | None, most_prompts: int
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._context_tokens = context_tokens
        self._most_prompts = most_prompts
        self._of = 0
        self._drawn: list[_Drawn] = []
        self.waiting_chars = 0
        self._threshold = 1 << 64
        self._counts: dict[str, Counter[int]] = {}
        self._longest = (-1, "")
        self._unrenderable = 0
        self._example = ""

    def rounds(self) -> int:
        """Of `measured`, if nothing is added meanwhile."""
        self._drop()
        return len(range(0, len(self._waiting()), AT_ONCE))

    def add(self, prompt: Prompt) -> None:
        self._of += 1
        rank = int(prompt.prompt_id[-16:], 16)
        if rank >= self._threshold:
            return
        self._drawn.append(_Drawn(rank, prompt.source, prompt.prompt_id, prompt))
        self.waiting_chars += characters(prompt)
        if self._most_prompts and len(self._drawn) >= 2 * self._most_prompts:
            self._drop()
        if self.waiting_chars > WAITING_CHARS:
            self._drop()
            if self.waiting_chars > 0.9 * WAITING_CHARS:
                self._measure()

    def measured(self) -> Iterator[None]:
        """Measure what waits, in rounds."""
        self._drop()
        waiting = self._waiting()
        for start in range(0, len(waiting), AT_ONCE):
            self._measure_some(waiting[start : start + AT_ONCE])
            yield
        self.waiting_chars = 0
        if not self._most_prompts:
            for one in self._drawn:
                self._count(one)
            self._drawn = []

    def lengths(self) -> Lengths:
        """Measure what is left, and tell of all. Nothing may be added afterwards."""
        self._measure()
        for one in self._drawn:
            self._count(one)
        self._drawn = []
        total = Counter[int]()
        for counts in self._counts.values():
            total.update(counts)
        found = Lengths(
            unit="characters" if self._tokenizer is None else "tokens",
            measured=total.total() + self._unrenderable,
            of=self._of,
            max_tokens=self._sampling.max_tokens,
            context_tokens=self._context_tokens,
            unrenderable=self._unrenderable,
            unrenderable_example=self._example,
            longest=self._longest[1],
        )
        if total:
            _describe(found, total)
            found.mean_by_source = {source: _mean(counts) for source, counts in sorted(self._counts.items())}
        context = self._context_tokens
        if context is not None and self._tokenizer is not None:
            found.too_long = sum(count for length, count in total.items() if length >= context)
            room = context - self._sampling.max_tokens
            found.cut = sum(count for length, count in total.items() if room < length < context)
        return found

    def _drop(self) -> None:
        """Leave those of the smallest ranks."""
        if self._most_prompts and len(self._drawn) > self._most_prompts:
            self._drawn.sort(key=lambda one: one.rank)
            del self._drawn[self._most_prompts :]
            self._threshold = self._drawn[-1].rank
            self.waiting_chars = sum(characters(one.prompt) for one in self._drawn if one.prompt is not None)

    def _measure(self) -> None:
        for _ in self.measured():
            pass

    def _waiting(self) -> list[_Drawn]:
        return [one for one in self._drawn if one.prompt is not None]

    def _measure_some(self, some: list[_Drawn]) -> None:
        texts: list[str] = []
        rendered: list[_Drawn] = []
        for one in some:
            prompt, one.prompt = cast(Prompt, one.prompt), None
            if self._tokenizer is None:
                one.length = characters(prompt)
                continue
            try:
                texts.append(prompt_text(self._tokenizer, prompt, self._sampling))
            except UNRENDERABLE as error:
                one.fault = f"prompt {one.prompt_id}: {error}"
            else:
                rendered.append(one)
        if self._tokenizer is not None:
            for one, length in zip(rendered, self._tokenizer.lengths(texts), strict=True):
                one.length = length

    def _count(self, one: _Drawn) -> None:
        if one.length is None:
            self._unrenderable += 1
            self._example = self._example or one.fault
            return
        self._counts.setdefault(one.source, Counter())[one.length] += 1
        self._longest = max(self._longest, (one.length, one.prompt_id))


def prompt_text(tokenizer: TargetTokenizer, prompt: Prompt, sampling: Sampling) -> str:
    """What the model reads before its answer. Raises UNRENDERABLE."""
    kwargs = cast(dict[str, Any] | None, sampling.extra_body.get("chat_template_kwargs"))
    return tokenizer.prompt_text(prompt.messages, prompt.tools, sampling.thinking, kwargs)


def characters(prompt: Prompt) -> int:
    return sum(_characters(message.get("content")) for message in prompt.messages)


def _characters(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = cast(list[dict[str, Any]], content or [])
    return sum(len(str(part.get("text", ""))) for part in parts)


def _describe(found: Lengths, counts: Counter[int]) -> None:
    ordered = sorted(counts.items())
    found.mean, found.least, found.most = _mean(counts), ordered[0][0], ordered[-1][0]
    found.median, found.p90, found.p99 = (_quantile(ordered, share) for share in (0.5, 0.9, 0.99))
    bars = Counter[int]()
    for length, count in ordered:
        bars[max(length - 1, 0).bit_length()] += count
    for power in range(min(bars), max(bars) + 1):
        found.histogram.append(Bar(least=2**power // 2 + 1 if power else 0, most=2**power, prompts=bars[power]))


def _mean(counts: Counter[int]) -> float:
    return sum(length * count for length, count in counts.items()) / counts.total()


def _quantile(ordered: list[tuple[int, int]], share: float) -> int:
    """The smallest length that this share of the prompts does not exceed."""
    wanted = math.ceil(share * sum(count for _, count in ordered))
    for length, count in ordered:
        wanted -= count
        if wanted <= 0:
            return length
    return ordered[-1][0]
