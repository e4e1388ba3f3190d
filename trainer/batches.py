"""Batches of rows: which rows share one, and in which order they come."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.targets import Row

WINDOW_BATCHES = 128
"""Rows are sorted by length among shuffled neighbours that fill this many batches: of many rows under 3 % of what is
computed is padding, for answers of 200 tokens as for 2,500 (docs/training.md). The batches come shuffled."""

ORDER = "1"
"""Which way of ordering this is. Another one wants another name: a training that is resumed in the middle of an epoch
then knows that it does not meet the rest of that epoch."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An assistant turn that is trained on, at 4 bytes a token."""

    key: str
    ids: Tensor  # (T,) int32
    num_prompt_tokens: int

    def row(self, epoch: int = 0) -> Row:
        mask = torch.ones(len(self.ids), dtype=torch.bool)
        mask[: self.num_prompt_tokens] = False
        return Row(self.key, self.ids.long(), mask, epoch)


def plan(rows: Sequence[Kept], batch_tokens: int, seed: str) -> list[list[Kept]]:
    """Cut rows into batches of at most `batch_tokens`, padding included, in an order that depends on the seed alone.

    No row may be longer than `batch_tokens`.
    """
    dice = random.Random(seed)
    batches: list[list[Kept]] = []
    for window in _windows(dice.sample(rows, len(rows)), WINDOW_BATCHES * batch_tokens):
        cut = list(_cut(sorted(window, key=lambda row: len(row.ids)), batch_tokens))
        batches += dice.sample(cut, len(cut))
    return batches


def _windows(rows: Sequence[Kept], num_tokens: int) -> Iterator[list[Kept]]:
    """Neighbours, until they have `num_tokens`."""
    window: list[Kept] = []
    held = 0
    for row in rows:
        window.append(row)
        held += len(row.ids)
        if held >= num_tokens:
            yield window
            window, held = [], 0
    if window:
        yield window


def _cut(rows: Sequence[Kept], batch_tokens: int) -> Iterator[list[Kept]]:
    """Rows come from short to long, so the newest is the one that all others are padded to."""
    batch: list[Kept] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row.ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
