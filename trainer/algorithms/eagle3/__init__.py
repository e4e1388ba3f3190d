"""EAGLE-3: one decoder layer that drafts from the target's hidden states (arXiv 2503.01840).

Position t takes the target's hidden states at t and the embedding of token t+1, and predicts token t+2. Training-time
test unrolls what drafting does: step i takes what the drafter itself passed on at t in step i-1 and the embedding of
the real token t+1+i, and predicts token t+2+i. A worked example is in docs/drafters.md.

    configuration   the shape, from the target and [eagle3]        training   the unrolled steps and their loss
    model           the weights                                    proposer   drafting
    layout          which positions draft, and what they learn     beginning  what is there before the first step
"""

from __future__ import annotations

from trainer.algorithms.eagle3.beginning import begin
from trainer.algorithms.eagle3.configuration import configure
from trainer.algorithms.eagle3.training import Eagle3, build

__all__ = ["Eagle3", "begin", "build", "configure"]
