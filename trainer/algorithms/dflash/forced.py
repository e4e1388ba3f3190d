"""What the training code drafts at every place of a row, in blocks as long as those that are served."""

# T tokens, B slots of a block, N blocks

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.dflash.algorithm import DFlash
from trainer.algorithms.dflash.anchors import lay_out
from trainer.algorithms.dflash.attention import Eager
from trainer.targets import Captured

BLOCKS_AT_ONCE = 64
"""Whose logits are held at once: with 16 slots and a vocabulary of 150,000 they take 0.6 GB."""


@torch.no_grad()
def hits(algorithm: DFlash, captured: Captured, k: int) -> Tensor:
    """(T, B - 1) bool, B = k + 1 or the trained block: [t, i] says that the block at token t has the row's token
    t + 1 + i in its slot i + 1. False where training has no label."""
    slots = 1 + min(k, algorithm.config.block_size - 1)
    found = torch.zeros(len(captured.row.ids), slots - 1, dtype=torch.bool)
    layout = lay_out(
        [captured],
        most=len(captured.row.ids),
        seed=0,
        slots=slots,
        heads=algorithm.config.num_attention_heads,
        soft=False,
        device=captured.hidden.device,
    )
    if layout is None:
        return found
    states = algorithm.drafter(
        algorithm.drafter.context(layout.hidden, layout.context_positions),
        algorithm.embed(layout.anchor_ids),
        layout.positions,
        Eager(layout.chunks),
    )
    best = torch.cat([algorithm.logits(part).argmax(-1) for part in states.split(BLOCKS_AT_ONCE)])
    found[layout.anchors[0]] = (best == layout.labels).cpu() & layout.is_label
    return found
