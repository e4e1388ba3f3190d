"""The learning rate: it rises linearly, then falls to zero, along a cosine or a line."""

from __future__ import annotations

import math
from typing import Literal

Shape = Literal["cosine", "linear"]


def learning_rate(step: int, *, peak: float, max_steps: int, warmup: float, shape: Shape = "cosine") -> float:
    """The rate of optimizer step `step`, counted from 0 to `max_steps - 1`.

    With `max_steps=10` and `warmup=0.2` it is 0.5, 1.0 of the peak in the two warmup steps, and then falls from the
    peak towards the zero that step 10 would have: 1.0, 0.96, 0.85, 0.69, 0.5, 0.31, 0.15, 0.04 along the cosine, and
    1.0, 0.875, 0.75 and so on along the line.
    """
    warmup_steps = round(warmup * max_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / (max_steps - warmup_steps)
    return peak * (1 - done) if shape == "linear" else peak * (1 + math.cos(math.pi * done)) / 2
