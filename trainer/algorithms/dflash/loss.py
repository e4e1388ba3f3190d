"""Cross-entropy of drafted slots against the tokens that came, or against what the target thought of them.

Each slot has a weight.

Head, loss and gradient are computed for a slice of blocks at a time, in the forward pass, and no logits outlive their
slice. The head is the target's and has no gradient.

    decay   slot k weighs exp(-(k - 1) / gamma): an error at a slot makes all after it worthless
    dpace   slot j weighs what the draft is expected to gain from it on, as sure as the drafter is by now:
            the sum over m >= j of q(1) * .. * q(m), with q(i) = (1 - alpha) * p(label i) + alpha
            (D-PACE, arXiv 2605.18810); without a gradient of its own
"""

# N blocks, B slots of a block, M labels of a slice, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLICE_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}
"""Logits of one slice: what stays in a CPU's cache, what fills a GPU."""
FEWEST_TOKENS = 64
"""A slice has at least these, or reading the head's weight would cost more than using it."""

GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}
"""By block size, from the paper (arXiv 2602.06036)."""

Weigh = Callable[[Tensor, Tensor], Tensor]
"""(probability of each label, which slots have one), each (N, B - 1), -> weights (N, B - 1)"""


def gamma_for(block_size: int) -> float:
    """The paper's, and what lies between and beyond them on a line."""
    return GAMMA.get(block_size, 1 + 3 * block_size / 8)


def decay(gamma: float) -> Weigh:
    def weigh(probability: Tensor, is_label: Tensor) -> Tensor:
        slots = torch.arange(is_label.shape[1], device=is_label.device)
        return torch.exp(-slots / gamma) * is_label

    return weigh


def dpace(alpha: float) -> Weigh:
    def weigh(probability: Tensor, is_label: Tensor) -> Tensor:
        reached = ((1 - alpha) * probability + alpha).mul(is_label).cumprod(1)
        return reached.flip(1).cumsum(1).flip(1)

    return weigh


class Sums(NamedTuple):
    """Of all blocks, none with a gradient. `by_slot` (4, B - 1): cross-entropy, labels that were the likeliest token,
    drafts that were right up to here, labels."""

    weight: Tensor
    by_slot: Tensor


class Soft(NamedTuple):
    """The target's distributions of the labels."""

    last: Tensor  # (N, B - 1, D): the target's last state before each label
    logits: Callable[[Tensor], Tensor]  # (.., D) -> (.., V) float32


def block_cross_entropy(  # noqa: PLR0917  # one tensor after the other
    states: Tensor, head: Tensor, labels: Tensor, is_label: Tensor, weigh: Weigh, soft: Soft | None = None
) -> tuple[Tensor, Sums]:
    """states (N, B - 1, H), head (V, H), labels and is_label (N, B - 1). Returns the weighted sum over all labels.

    `is_label` is on the CPU: how many labels a slice has is known there, and no slice waits for the GPU.
    """
    total, weight, by_slot = _BlockCrossEntropy.apply(states, head, labels, is_label, weigh, soft)  # pyright: ignore
    return total, Sums(weight, by_slot)


class _BlockCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # apply takes no keywords
        ctx: Any,
        states: Tensor,
        head: Tensor,
        labels: Tensor,
        is_label: Tensor,
        weigh: Weigh,
        soft: Soft | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        num_slots = labels.shape[1]
        gradient = torch.zeros_like(states) if ctx.needs_input_grad[0] else None
        total, weight = (states.new_zeros((), dtype=torch.float32) for _ in range(2))
        by_slot = states.new_zeros(4, num_slots, dtype=torch.float32)

        with torch.autocast(device, enabled=False):
            head = head.to(dtype)
            size = max(FEWEST_TOKENS, SLICE_ELEMENTS.get(device, SLICE_ELEMENTS["cuda"]) // len(head)) // num_slots
            for start in range(0, len(states), max(1, size)):
                part = slice(start, start + max(1, size))
                where = is_label[part].flatten().nonzero()[:, 0].to(states.device, non_blocking=True)  # (M,)
                there = is_label[part].to(states.device, non_blocking=True)
                label = labels[part].flatten()[where]
                state = states[part].flatten(0, 1)[where].to(dtype)  # (M, H)
                last = None if soft is None else soft.last[part].flatten(0, 1)[where]
                target = None if soft is None or last is None else torch.softmax(soft.logits(last), dim=-1)
                loss, is_best, probability, by_logits = _slice(state, head, label, target)

                table = by_slot.new_zeros(3, there.numel())
                table[:, where] = torch.stack((loss, is_best, probability))
                table = table.view(3, *there.shape)
                weights = weigh(table[2], there)
                total += (weights * table[0]).sum()
                weight += weights.sum()
                by_slot += torch.stack((table[0], table[1], table[1].cumprod(1), there.float())).sum(1)
                if gradient is not None:
                    moved = by_logits.to(dtype) @ head
                    if target is None:  # the label's own part goes straight to its row of the head
                        moved.sub_(head[label])
                    moved = moved.mul_(weights.flatten()[where][:, None]).to(states.dtype)
                    gradient[part].flatten(0, 1)[where] = moved
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight, by_slot)
        return total, weight, by_slot

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None, None, None, None


def _slice(state: Tensor, head: Tensor, label: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each label its cross-entropy, whether it is the likeliest token, and its probability; and the gradient by the
    logits (M, V), of a hard label but for the label itself."""
    logits = (state @ head.T).float()
    own = logits.gather(-1, label[:, None])[:, 0]
    highest = logits.amax(-1)
    q = torch.softmax(logits, dim=-1)
    # log(sum(exp(logits))) from what is there: the highest probability is exp(highest) over that sum.
    normaliser = highest - q.amax(-1).log()
    probability = torch.exp(own - normaliser)
    if target is None:
        return normaliser - own, (own == highest).float(), probability, q
    expected = (target * logits).sum(-1)
    return normaliser - expected, (own == highest).float(), probability, q.sub_(target)
