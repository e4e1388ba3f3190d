"""Where the time of a step goes, by torch's profiler: the same rules for both trainers.

An operation counts by its own time, without what it calls, to the first of these that fits it:

    optimizer         called by an optimizer's step
    head and loss     it reads or makes something as wide as the vocabulary
    attention         products of more than two axes, softmax, torch's own attention, masks of tokens by tokens
    matrix products   all other products: projections, feed-forward, fusion
    rest              norms, rotary positions, activations, sums, copies, and the engine of autograd
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

CLASSES = ("matrix products", "attention", "head and loss", "optimizer", "rest")
PRODUCTS = ("aten::mm", "aten::addmm")
ATTENTION = ("aten::bmm", "aten::baddbmm", "softmax", "scaled_dot_product")
HEAD = ("_HeadLoss", "_BlockCrossEntropy")
"""Python of ours, which no shape tells."""


def by_class(step: Callable[[], object], vocab_size: int, batch_tokens: int) -> dict[str, float]:
    """Milliseconds of CPU for each class, over one call."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    sums = Counter[str]()
    for event in found.events() or []:
        sums[_class(event, vocab_size, batch_tokens)] += event.self_cpu_time_total / 1000
    return {name: sums[name] for name in CLASSES}


def _class(event: Any, vocab_size: int, batch_tokens: int) -> str:
    caller = event
    while caller is not None:
        if caller.name.startswith("Optimizer.step"):
            return "optimizer"
        caller = caller.cpu_parent
    shapes = [shape for shape in event.input_shapes or [] if shape]
    if event.name in HEAD or any(vocab_size in shape for shape in shapes):
        return "head and loss"
    is_mask = any(len(shape) > 1 and min(shape[-2:]) >= batch_tokens - 64 for shape in shapes)
    if is_mask or any(name in event.name for name in (*ATTENTION, "_Attend")):
        return "attention"
    return "matrix products" if event.name in PRODUCTS else "rest"
