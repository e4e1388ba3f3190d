"""What was accepted, beside what the training code says of the very same drafts.

Training never drafts: it feeds each step the tokens that really came. Where a drafted token is right, drafting feeds
the next step the same, so of a greedy draft both must say the same up to its first miss. They are compared draft by
draft, at the places where drafts really began, so a gap is no matter of chance but of two pieces of code that differ:
the one that trains and the one that drafts.
"""

# T tokens, k drafted tokens

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from trainer import algorithms
from trainer.algorithms import Algorithm
from trainer.evaluation.asking import Asked
from trainer.evaluation.intervals import Interval, of_ratio
from trainer.measure import Track, untracked
from trainer.speculate import Answer
from trainer.targets import Captured, Row
from trainer.targets.hf import HfTarget

NEAR_TIES = 0.02
"""Tokens a draft by which both may differ: sums in another order decide between tokens that are all but equal."""

OVERFIT = 0.1
"""By how much the first position may be righter in training than on held-out answers, their own interval added."""

Hits = Callable[[Captured], Tensor]
"""(T, k) bool, as `trainer.algorithms.hits` gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherForced:
    """`acceptance_length` is what the training code says of `drafts`, `real_acceptance_length` what was accepted of the
    same ones, both in their first `k` positions. `gap` is the first less the second; it may be `tolerance`.

    `accuracy_per_position`: at every place of the answers, not only where a draft began, how often the token at this
    position is right after tokens that were right: what training logs as `accuracy`.
    """

    k: int
    drafts: int
    accuracy_per_position: list[float]
    acceptance_length: float
    real_acceptance_length: float
    gap: float
    interval: Interval | None
    tolerance: float | None
    is_alarming: bool
    first_interval: Interval | None


def compare(
    algorithm: Algorithm,
    target: HfTarget,
    asked: Sequence[Asked],
    answers: Sequence[Answer],
    *,
    k: int,
    track: Track = untracked,
) -> TeacherForced:
    """Of greedy answers with a drafter."""
    rows = [_row(number, one.ids, answer.ids) for number, (one, answer) in enumerate(zip(asked, answers, strict=True))]
    found = [
        algorithms.hits(algorithm, captured, k)
        for captured in chain.from_iterable(target.capture([row] for row in track(rows, "as training sees it")))
    ]
    return compared(asked, answers, found)


def compared(asked: Sequence[Asked], answers: Sequence[Answer], found: Sequence[Tensor]) -> TeacherForced:
    """`found` has the hits (T, k) of each prompt and its answer."""
    k = found[0].shape[1]
    forced: dict[str, float] = defaultdict(float)
    real: dict[str, float] = defaultdict(float)
    number: dict[str, int] = defaultdict(int)
    first: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    right, places = torch.zeros(k), torch.zeros(k)
    for one, answer, hits in zip(asked, answers, found, strict=True):
        key, begin, end = one.conversation, len(one.ids), len(one.ids) + len(answer.ids)
        for position in range(k):
            here = hits[begin : end - 1 - position, position]
            right[position] += here.sum()
            places[position] += len(here)
        held, of = first[key]
        first[key] = held + float(hits[begin : end - 1, 0].sum()), of + max(end - 1 - begin, 0)
        for start, drafted, accepted in zip(answer.starts, answer.drafted, answer.accepted, strict=True):
            known = min(k, len(answer.ids) - start)  # what was drafted past the end, nobody knows
            if drafted < k or known <= 0:  # at the end of the context: a shorter block is another block
                continue
            forced[key] += int(hits[begin + start - 1, :known].long().cumprod(0).sum())
            real[key] += min(accepted, known)
            number[key] += 1
    drafts = sum(number.values())
    gap = (sum(forced.values()) - sum(real.values())) / max(drafts, 1)
    interval = of_ratio([(forced[key] - real[key], number[key]) for key in number])
    tolerance = None if interval is None else NEAR_TIES + (interval[1] - interval[0]) / 2
    return TeacherForced(
        k=k,
        drafts=drafts,
        accuracy_per_position=(right / places.clamp(min=1)).tolist(),
        acceptance_length=1 + sum(forced.values()) / max(drafts, 1),
        real_acceptance_length=1 + sum(real.values()) / max(drafts, 1),
        gap=gap,
        interval=interval,
        tolerance=tolerance,
        is_alarming=tolerance is not None and abs(gap) > tolerance,
        first_interval=of_ratio(list(first.values()), most=1),
    )


def alarm(forced: TeacherForced) -> str | None:
    """What a gap means, in words."""
    if not forced.is_alarming:
        return None
    return (
        f"{forced.real_acceptance_length:.2f} tokens per pass are accepted, where the code that trains says "
        f"{forced.acceptance_length:.2f} of the same {forced.drafts:,} drafts: a gap of {forced.gap:+.2f}, of which "
        f"{forced.tolerance:.2f} may be chance. Drafting is not what training was. Look, in this order, for states "
        "of another layer (one off) or of another token (one off), a norm that only one of them has "
        "(norm_before_residual, norm_before_fc, fc_norm, norm_output, the target's final norm), RoPE with another "
        "base, scaling or position, and a draft vocabulary (d2t) of another drafter."
    )


def overfit(forced: TeacherForced, trained: list[float] | None) -> str | None:
    """`trained` is the accuracy by position that training logged last."""
    if not trained or forced.first_interval is None or not forced.accuracy_per_position:
        return None
    here, (_, high) = forced.accuracy_per_position[0], forced.first_interval
    if trained[0] - high <= OVERFIT:
        return None
    return (
        f"The first drafted token is right {trained[0]:.0%} of the time in training and {here:.0%} (at most "
        f"{high:.0%}) on held-out answers. The drafter has learnt its rows by heart (more data, fewer epochs), the "
        "held-out prompts are of another kind, or this is not the target it was trained on: another checkpoint, "
        "precision or chat template."
    )


def _row(number: int, prompt: list[int], answer: list[int]) -> Row:
    mask = torch.ones(len(prompt) + len(answer), dtype=torch.bool)
    mask[: len(prompt)] = False
    return Row(f"heldout-{number}", torch.tensor(prompt + answer), mask)
