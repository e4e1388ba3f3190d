"""What the training code drafts at every place of a row, each step fed the tokens that really came."""

# T tokens, S draft steps

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.eagle3.training import Eagle3
from trainer.targets import Captured


@torch.no_grad()
def hits(algorithm: Eagle3, captured: Captured, k: int) -> Tensor:
    """(T, min(k, ttt_steps)) bool: [t, i] says that the draft after token t has the row's token t + 1 + i at step i.

    False where training has no loss: see the layout.
    """
    row, num_steps = captured.row, algorithm.config.ttt_steps
    found = torch.zeros(len(row.ids), min(k, num_steps), dtype=torch.bool)
    layout = algorithm.collate([captured])
    if layout is None:
        return found
    mask, ids = row.mask.cpu(), row.ids.cpu()
    learnt = (mask[:-1] & mask[1:]).nonzero()[:, 0]
    learnt = learnt[learnt >= num_steps]  # token u + 1, which step i drafts after token u - i
    for step, passed in enumerate(algorithm.unroll(layout)[:k]):
        best = algorithm.drafter.logits(passed.index_select(0, layout.chosen - step)).argmax(-1).cpu()
        found[learnt - step, step] = best == ids[learnt + 1]
    return found
