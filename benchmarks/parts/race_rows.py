"""What both trainers of the race read: rows of exact ids, what the target thought of them, and batches cut once.

    rows.json     the ids of every row, and how many of them are its prompt
    states.f32    for each token the chosen layers and the last state, side by side, as float32

Imported by two environments, so it needs no more than NumPy and torch.
"""

# T tokens of a row, K chosen layers, D hidden size of the target

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

WINDOW = 64
"""Shuffled rows among which a batch looks for one that still fits."""


@dataclass(frozen=True, slots=True)
class Example:
    number: int
    epoch: int
    ids: Tensor  # (T,)
    mask: Tensor  # (T,) bool: true where the target generated the token
    hidden: Tensor  # (T, K*D)
    last: Tensor  # (T, D): before the final norm


class Rows:
    """The rows in a folder. States are read from the file row by row, into memory that is freed with the batch."""

    def __init__(self, folder: Path) -> None:
        held = json.loads((folder / "rows.json").read_text())
        self.width: int = held["width"]  # (K + 1) * D
        self.hidden_size: int = held["hidden_size"]
        self._rows: list[tuple[list[int], int]] = [(row["ids"], row["prompt"]) for row in held["rows"]]
        self._starts = list(accumulate((len(ids) for ids, _ in self._rows), initial=0))
        self._states = folder / "states.f32"

    def __len__(self) -> int:
        return len(self._rows)

    def length(self, number: int) -> int:
        return len(self._rows[number][0])

    def example(self, number: int, epoch: int) -> Example:
        ids, num_prompt = self._rows[number]
        count, offset = len(ids) * self.width, self._starts[number] * self.width * 4
        states = torch.from_numpy(np.fromfile(self._states, np.float32, count, offset=offset))
        hidden, last = states.view(len(ids), self.width).tensor_split([self.width - self.hidden_size], dim=1)
        mask = torch.arange(len(ids)) >= num_prompt
        return Example(number, epoch, torch.tensor(ids), mask, hidden.contiguous(), last.contiguous())

    def batches(self, seed: int, batch_tokens: int) -> Iterator[tuple[int, list[int]]]:
        """Epoch and rows of each step, without end: shuffled anew in each epoch, and packed with little room left."""
        epoch = 0
        while True:
            order = list(range(len(self)))
            random.Random(f"{seed} {epoch}").shuffle(order)
            while order:
                batch, room = list[int](), batch_tokens
                for number in order[:WINDOW]:
                    if self.length(number) <= room:
                        batch.append(number)
                        room -= self.length(number)
                order = [number for number in order if number not in batch]
                yield epoch, batch
            epoch += 1


def num_tokens(examples: Sequence[Example]) -> int:
    return sum(len(example.ids) for example in examples)
