"""The loss of a drafter against its target's distribution, slice by slice through the head.

The logits of a whole batch are the largest tensors of training by far: 8,192 tokens of a vocabulary of 150,000 are
5 GB, for each draft step. So the head, the loss and both their gradients are computed for a slice of tokens at a time,
in the forward pass, and no logits outlive their slice. The target's distribution is computed once for all steps.
"""

# S draft steps, M tokens with a loss, H hidden size, D that of the target, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SLICE_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}
"""Logits of one slice: what stays in a CPU's cache, what fills a GPU."""
FEWEST_TOKENS = 64
"""A slice has at least these, or reading the head's weight would cost more than using it."""


def soft_cross_entropy(
    states: Tensor, weight: Tensor, last: Tensor, target_logits: Callable[[Tensor], Tensor], step_weights: list[float]
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of softmax(states @ weight.T) against softmax(target_logits(last)), summed.

    states (S, M, H), weight (V, H), last (M, D). Returns the sum over tokens and steps, steps weighted, and what has
    no gradient: a tensor (3, S) with each step's sums of loss, of argmax equal to the target's, and of min(p, q).
    """
    return _SoftCrossEntropy.apply(states, weight, last, target_logits, step_weights)  # pyright: ignore[reportReturnType]


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # apply takes no keywords
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        last: Tensor,
        target_logits: Callable[[Tensor], Tensor],
        step_weights: list[float],
    ) -> tuple[Tensor, Tensor]:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        with_gradient = any(ctx.needs_input_grad[:2])
        grad_states = torch.empty_like(states) if with_gradient else None
        grad_weight = torch.zeros_like(weight) if with_gradient else None
        sums = states.new_zeros(3, len(states), dtype=torch.float32)

        with torch.autocast(device, enabled=False):
            head = weight.to(dtype)
            size = max(FEWEST_TOKENS, SLICE_ELEMENTS.get(device, SLICE_ELEMENTS["cuda"]) // len(weight))
            for start in range(0, len(last), size):
                part = slice(start, start + size)
                logits = target_logits(last[part])
                best = logits.argmax(-1, keepdim=True)
                target = torch.softmax(logits, dim=-1)
                for step, scale in enumerate(step_weights):
                    state = states[step, part].to(dtype)
                    gradient = _slice(state, head, target, best, sums[:, step])
                    if grad_states is not None and grad_weight is not None:
                        gradient = gradient.mul_(scale).to(dtype)
                        grad_states[step, part] = gradient @ head
                        grad_weight += gradient.T @ state
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(sums)
        return sums[0] @ sums.new_tensor(step_weights), sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grad_outputs[0], grad_weight * grad_outputs[0], None, None, None


def _slice(state: Tensor, head: Tensor, target: Tensor, best: Tensor, sums: Tensor) -> Tensor:
    """Add loss, matches and overlap of one slice to `sums` (3,). Returns the gradient by the logits, q - p."""
    logits = (state @ head.T).float()
    highest = logits.amax(-1, keepdim=True)
    sums[1] += (logits.gather(-1, best) == highest).sum()
    expected = torch.dot(target.flatten(), logits.flatten())
    q = torch.softmax(logits, dim=-1)
    # log(sum(exp(logits))) from what is there: the highest probability is exp(highest) over that sum.
    log_normaliser = highest - q.amax(-1, keepdim=True).log()
    sums[0] += log_normaliser.sum() - expected
    sums[2] += torch.minimum(q, target).sum()
    return q.sub_(target)
