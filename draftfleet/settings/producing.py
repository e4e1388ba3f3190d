"""[producer]: which data sets are read, and how."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from draftfleet.settings.section import Section


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression of Python, {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class Rows(Section):
    """Which rows are read, from where."""

    data: str | list[str] = Field(
        default="",
        description="Files, a pattern like `chats/*.jsonl`, a folder, the name of a data set on the hub, or "
        "`preset:NAME`. Several files: a list.",
    )
    preset: str | None = Field(
        default=None,
        description="A known data set, by the name that `draftfleet presets` lists. `data` may name a copy.",
    )
    split: str | None = Field(default=None, description="Of the hub or of a folder. Unset: the preset's, else train.")
    subset: str | None = Field(default=None, description="Configuration of a data set on the hub.")
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of a data set on the hub. Unset: its newest, recorded."
    )
    column: str | None = Field(
        default=None, description="Column with the conversation or prompt. Unset: found by itself."
    )
    limit: PositiveInt | None = Field(default=None, description="Read at most this many lines.")
    sample: PositiveInt | None = Field(
        default=None, description="Take this many distinct prompts of those that were read, drawn by `producer.seed`."
    )
    languages: list[str] | None = Field(
        default=None, description="Keep rows whose language column holds one of these. Unset: all."
    )
    language_column: str | None = Field(
        default=None, description="Column that says the language. Unset: `language` or `lang`."
    )
    min_prompt_chars: PositiveInt | None = Field(default=None, description="Shortest prompt in characters.")
    max_prompt_chars: PositiveInt | None = Field(default=None, description="Longest prompt in characters.")
    min_prompt_tokens: PositiveInt | None = Field(
        default=None, description="Shortest prompt in tokens of the target's template, which needs `target.path`."
    )
    max_prompt_tokens: PositiveInt | None = Field(
        default=None, description="Longest prompt in tokens of the target's template, which needs `target.path`."
    )
    keep: Pattern | None = Field(default=None, description="Keep prompts in which this regular expression is found.")
    drop: Pattern | None = Field(
        default=None, description="Leave out prompts in which this regular expression is found."
    )
    match: Literal["last", "any"] | None = Field(
        default=None, description="Where `keep` and `drop` look: in the last user turn, or in any. Unset: last."
    )


class Source(Rows):
    """One data set of a mixture. What is unset here is as in [producer], but for data, its place, limit and sample."""

    name: str = Field(
        default="", description="Short name that prompts and samples carry. Unset: of the preset, file or data set."
    )
    weight: float | None = Field(
        default=None, gt=0, description="Share of the prompts, relative to the others. On every source or on none."
    )
    heldout: float | None = Field(
        default=None, ge=0, le=1, description="Share of its prompts held out. Unset: `producer.heldout`. 1: all."
    )


class Producer(Rows):
    """From data sets to the queue."""

    split_column: str | None = Field(
        default=None, description='Column that says "train" or "heldout". Unset: `split`, if there.'
    )
    heldout: float = Field(
        default=0.02, ge=0, lt=1, description="Share of prompts held out by hash where no column says it."
    )
    seed: NonNegativeInt = Field(default=0, description="Which prompts `sample` draws.")
    sources: list[Source] = Field(
        default_factory=list[Source], description="Several data sets, mixed. Instead of `producer.data`."
    )
    until: Literal["first", "all"] | None = Field(
        default=None,
        description="A mixture ends with its first source that ends, or with all. Unset: first where sources have "
        "weights, all where they have none.",
    )
    batch_size: PositiveInt = Field(
        default=64, description="Rows that travel under one reference: prompts, times sampling.n."
    )
    strict: bool = Field(default=False, description="Stop at the first malformed line instead of counting it.")
    turns: Literal["last", "all"] = Field(
        default="last", description="Which assistant turns of a conversation the target answers anew."
    )
    priority: Literal["high", "normal", "low"] | None = Field(
        default=None, description="Of the run among others. Unset: as it is, normal for a new run. Not pinned."
    )
    token_budget: PositiveInt | None = Field(
        default=None, description="Completion tokens after which the run is paused. Unset: as it is. Not pinned."
    )
