"""The loss of a drafter against its target's distribution, slice by slice through the head.

The logits of a whole batch are the largest tensors of training by far: 8,192 tokens of a vocabulary of 150,000 are
5 GB, for each draft step. So the head, the loss and both their gradients are computed for a slice of tokens at a time,
in the forward pass, and no logits outlive their slice. The target's distribution is computed once for all steps.

With p the target's distribution, P that part of it that lies in the draft vocabulary, m its sum (1 if the vocabulary is
the whole one), q the drafter's distribution over the draft vocabulary, and a = sum min(P, q) what sampling accepts:

    soft_ce      - sum P/m log q, where the target's best token can be drafted; 0 elsewhere
    forward_kl   sum P log(P / (m q))                                    = m KL(P/m | q)
    lk           l sum P log(P / (m q)) + (1 - l) (1 - a), l = exp(-3 a)   LK hybrid, arXiv 2602.23881; l is a constant

The gradients by the drafter's logits, of which the last has `below` = 1 where q < P:

    soft_ce      q - P/m        forward_kl   m q - P
    lk           l (m q - P) - (1 - l) q (below - sum q below)
"""

# S draft steps, M tokens with a loss, H hidden size, D that of the target, V vocabulary, R draft vocabulary
# n tokens of a slice

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

SLICE_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}
"""Logits of one slice: what stays in a CPU's cache, what fills a GPU."""
FEWEST_TOKENS = 64
"""A slice has at least these, or reading the head's weight would cost more than using it."""

LK_DECAY = 3.0
"""How fast the hybrid turns from divergence to acceptance: the best of the paper's."""

LossKind = Literal["soft_ce", "forward_kl", "lk"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What the drafter is held against."""

    step_weights: list[float]  # of each draft step
    vocab_size: int  # V
    kind: LossKind = "soft_ce"
    draft_ids: Tensor | None = None  # (R,): the target's ids that can be drafted, ascending; None: all of them


class HeadLoss(NamedTuple):
    total: Tensor  # scalar, summed over tokens and steps, steps weighted
    sums: Tensor  # (3, S): loss, argmax equal to the target's, sum of min(p, q); no gradient
    num_inside: Tensor  # scalar: tokens whose best one, to the target, can be drafted; no gradient


def head_loss(
    states: Tensor, weight: Tensor, last: Tensor, target_logits: Callable[[Tensor], Tensor], objective: Objective
) -> HeadLoss:
    """The loss of softmax(states @ weight.T) against softmax(target_logits(last)).

    states (S, M, H), weight (R, H), last (M, D); `target_logits` gives all V.
    """
    return HeadLoss(*_HeadLoss.apply(states, weight, last, target_logits, objective))  # pyright: ignore[reportGeneralTypeIssues]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # apply takes no keywords
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        last: Tensor,
        target_logits: Callable[[Tensor], Tensor],
        objective: Objective,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        grad_states = torch.empty_like(states) if any(ctx.needs_input_grad[:2]) else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        sums = states.new_zeros(3, len(states), dtype=torch.float32)
        num_inside = sums.new_zeros(())
        score = _score_lk if objective.kind == "lk" else _score_divergence

        with torch.autocast(device, enabled=False):
            head = weight.to(dtype)
            size = max(FEWEST_TOKENS, SLICE_ELEMENTS.get(device, SLICE_ELEMENTS["cuda"]) // objective.vocab_size)
            for start in range(0, len(last), size):
                part = slice(start, start + size)
                wanted = _wanted(target_logits(last[part]), objective)
                num_inside += len(wanted.best) if wanted.inside is None else wanted.inside.sum()
                for step, scale in enumerate(objective.step_weights):
                    state = states[step, part].to(dtype)
                    gradient = score((state @ head.T).float(), wanted, sums[:, step])
                    if grad_states is not None:
                        gradient = gradient.mul_(scale).to(dtype)
                        grad_states[step, part] = gradient @ head
                        if grad_weight is not None:
                            grad_weight += gradient.T @ state
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(sums, num_inside)
        return sums[0] @ sums.new_tensor(objective.step_weights), sums, num_inside

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        by_weight = None if grad_weight is None else grad_weight * grad_outputs[0]
        return grad_states * grad_outputs[0], by_weight, None, None, None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the target says of one slice, the same for all steps."""

    p: Tensor  # (n, R): its distribution, as much as lies in the draft vocabulary
    against: Tensor  # (n, R): what the cross-entropy is against, of which each row sums to
    mass: Tensor | None  # (n, 1); None: to one
    best: Tensor  # (n, 1): index in the draft vocabulary of its best token, any index if that cannot be drafted
    inside: Tensor | None  # (n, 1) bool: whether it can; None: always
    least: Tensor | None  # (n, 1): the least that the cross-entropy can be, which makes a divergence of it; None: zero


def _wanted(logits: Tensor, objective: Objective) -> _Wanted:
    """logits (n, V) of the target."""
    best = logits.argmax(-1, keepdim=True)
    ids = objective.draft_ids
    if ids is None:
        p = torch.softmax(logits, dim=-1)
        least = None if objective.kind == "soft_ce" else _least(p, logits, None)
        return _Wanted(p, p, None, best, None, least)
    index = torch.searchsorted(ids, best).clamp(max=len(ids) - 1)
    inside = ids[index] == best
    whole = logits.logsumexp(-1, keepdim=True)
    logits = logits.index_select(-1, ids)
    p = (logits - whole).exp()
    if objective.kind == "soft_ce":
        return _Wanted(p, torch.softmax(logits, dim=-1).mul_(inside), inside.to(p.dtype), index, inside, None)
    mass = p.sum(-1, keepdim=True)
    return _Wanted(p, p, mass, index, inside, _least(p, logits, mass))


def _least(p: Tensor, logits: Tensor, mass: Tensor | None) -> Tensor:
    """- sum P log(P / m), where logits are those of the draft vocabulary."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    return (normaliser if mass is None else mass * normaliser) - (p * logits).sum(-1, keepdim=True)


def _score_divergence(logits: Tensor, wanted: _Wanted, sums: Tensor) -> Tensor:
    """Add loss, matches and overlap of one slice to `sums` (3,). Returns the gradient by the logits (n, R)."""
    log_normaliser, q = _distribution(logits, wanted, sums)
    expected = torch.dot(wanted.against.flatten(), logits.flatten())
    sums[0] += (log_normaliser if wanted.mass is None else wanted.mass * log_normaliser).sum() - expected
    if wanted.least is not None:
        sums[0] -= wanted.least.sum()
    sums[2] += torch.minimum(q, wanted.p).sum()
    return (q if wanted.mass is None else q.mul_(wanted.mass)).sub_(wanted.against)


def _score_lk(logits: Tensor, wanted: _Wanted, sums: Tensor) -> Tensor:
    """As `_score_divergence`."""
    assert wanted.least is not None
    log_normaliser, q = _distribution(logits, wanted, sums)
    expected = (wanted.against * logits).sum(-1, keepdim=True)
    divergence = (log_normaliser if wanted.mass is None else wanted.mass * log_normaliser) - expected - wanted.least
    accepted = torch.minimum(q, wanted.p).sum(-1, keepdim=True)
    share = torch.exp(-LK_DECAY * accepted)
    sums[0] += (share * divergence + (1 - share) * (1 - accepted)).sum()
    sums[2] += accepted.sum()

    q_below = torch.where(q < wanted.p, q, 0.0)
    of_acceptance = q_below - q * q_below.sum(-1, keepdim=True)
    of_divergence = (q if wanted.mass is None else q.mul_(wanted.mass)).sub_(wanted.against)
    return of_divergence.mul_(share).sub_(of_acceptance.mul_(1 - share))


def _distribution(logits: Tensor, wanted: _Wanted, sums: Tensor) -> tuple[Tensor, Tensor]:
    """log sum exp of the logits (n, 1), and their softmax (n, R). Adds the matches to `sums`."""
    highest = logits.amax(-1, keepdim=True)
    matches = logits.gather(-1, wanted.best) == highest
    sums[1] += (matches if wanted.inside is None else matches & wanted.inside).sum()
    q = torch.softmax(logits, dim=-1)
    # log(sum(exp(logits))) from what is there: the highest probability is exp(highest) over that sum.
    return highest - q.amax(-1, keepdim=True).log(), q
