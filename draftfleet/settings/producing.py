"""[producer]: which data set is read, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from draftfleet.settings.section import Section


class Producer(Section):
    """From a data set to the queue."""

    data: str = Field(
        default="", description="A .jsonl, .jsonl.gz or .parquet file, or the name of a `datasets` data set."
    )
    data_split: str = Field(default="train", description="Which split of a `datasets` data set to read.")
    column: str | None = Field(
        default=None, description="Column with the conversation or prompt. Unset: found by itself."
    )
    split_column: str | None = Field(
        default=None, description='Column that says "train" or "heldout". Unset: `split`, if there.'
    )
    heldout: float = Field(
        default=0.02, ge=0, lt=1, description="Share of prompts held out by hash where no column says it."
    )
    batch_size: PositiveInt = Field(default=64, description="Prompts that travel under one reference.")
    limit: PositiveInt | None = Field(default=None, description="Read at most this many lines.")
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
