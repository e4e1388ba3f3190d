"""Drafting with EAGLE-3, one sequence at a time."""

# P positions so far, n key-value heads, d head size

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithms import Choose, Draft, greedy
from trainer.algorithms.eagle3.model import Drafter
from trainer.algorithms.layers import Rotary, attend_last


class Eagle3Proposer:
    """Drafting for one sequence. Keys and values of step 0 are kept; those of a draft are thrown away."""

    def __init__(self, drafter: Drafter, rotary: Rotary, embed: Callable[[Tensor], Tensor]) -> None:
        self._drafter = drafter
        self._rotary = rotary
        self._embed = embed
        self._keys: Tensor | None = None  # (P, n, d)
        self._values: Tensor | None = None

    @torch.no_grad()
    def propose(self, ids: Tensor, hidden: Tensor, k: int, choose: Choose = greedy) -> Draft:
        """As the protocol says (trainer.algorithms)."""
        drafter, layer = self._drafter, self._drafter.midlayer
        attention = layer.self_attn
        x, residual = layer.inputs(self._embed(ids), drafter.fuse(hidden))
        cached = 0 if self._keys is None else len(self._keys)
        positions = torch.arange(cached, cached + len(ids), device=x.device)
        cos, sin = self._rotary.tables(positions)
        key, value = attention.key_value(x, cos, sin)
        self._keys = key if self._keys is None else torch.cat((self._keys, key))
        self._values = value if self._values is None else torch.cat((self._values, value))

        x, residual, cos, sin = x[-1:], residual[-1:], cos[-1:], sin[-1:]
        keys, values = [self._keys], [self._values]
        passed = residual
        drafted: list[Tensor] = []
        logits: list[Tensor] = []
        for step in range(k):
            if step > 0:
                x, residual = layer.inputs(self._embed(drafted[-1]), passed)
                cos, sin = self._rotary.tables(positions[-1:] + step)
                key, value = attention.key_value(x, cos, sin)
                keys.append(key)
                values.append(value)
            attended = attend_last(attention.query(x, cos, sin), torch.cat(keys), torch.cat(values))
            passed = drafter.passed_on(layer.outputs(residual, attended))
            logits.append(drafter.logits(passed))
            drafted.append(choose(logits[-1]))
        return Draft([int(one) for one in drafted], torch.cat(logits))
