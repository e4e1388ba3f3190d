"""Drafting for one sequence: a block at the newest token, in one forward pass."""

# n new states, k drafted tokens, K chosen layers, D hidden size of the target, V vocabulary

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.algorithms import Choose, Draft, greedy
from trainer.algorithms.dflash.attention import Chunk, Eager, KeyValue, cut

if TYPE_CHECKING:
    from trainer.algorithms.dflash.algorithm import DFlash


class DFlashProposer:
    """Keys and values of the target's states are kept for each layer; those of a block are thrown away."""

    def __init__(self, algorithm: DFlash) -> None:
        self._algorithm = algorithm
        self._context: list[KeyValue] = []

    @torch.no_grad()
    def propose(self, ids: Tensor, hidden: Tensor, k: int, choose: Choose = greedy) -> Draft:
        """At most `block_size - 1` tokens. As in the engines, a shorter draft is a shorter block."""
        algorithm, drafter = self._algorithm, self._algorithm.drafter
        known = len(self._context[0][0]) if self._context else 0
        new = drafter.context(hidden, torch.arange(known, known + len(ids), device=ids.device))
        if self._context:
            new = [
                (torch.cat((keys, key)), torch.cat((values, value)))
                for (keys, values), (key, value) in zip(self._context, new, strict=True)
            ]
        self._context = new

        slots = 1 + min(k, algorithm.config.block_size - 1)
        if slots == 1:
            return Draft([], algorithm.logits(hidden.new_empty(0, algorithm.config.hidden_size)))
        anchor = torch.tensor([known + len(ids)])

        def chunks(window: int | None) -> list[Chunk]:
            return cut(anchor, 0, 0, slots=slots, heads=1, window=window, device=ids.device)

        positions = (anchor[:, None] + torch.arange(slots)).to(ids.device)
        states = drafter(self._context, algorithm.embed(ids[-1:]), positions, Eager(chunks))
        logits = algorithm.logits(states[0])
        return Draft(choose(logits).tolist(), logits)
