"""Answer prompts with a drafter and plainly, timed at the same number of requests, and count what was accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from trainer.algorithms import Algorithm
from trainer.evaluation.rules import Sampling
from trainer.speculate import Answer, Limits, decode, decode_batch, decode_with_drafter
from trainer.targets.hf import HfTarget

BATCH_PROMPTS = 32
"""Prompts that are decoded plainly at once, for comparison."""

TIMED_PROMPTS = 8
"""Prompts that are decoded plainly one by one, since speeds compare only at the same number of requests."""

T = TypeVar("T")


class Track(Protocol):
    """Pass items through, one by one, and show how many have passed."""

    def __call__(self, items: Sequence[T], title: str) -> Iterable[T]: ...


def untracked(items: Sequence[T], title: str) -> Iterable[T]:
    return items


@dataclass(frozen=True, slots=True)
class Measured:
    """Answers with the drafter and plain ones to the same prompts; speeds of the first `timed`, one by one.

    Sampled, there are plain answers to those alone: they are other draws, and nothing is compared.
    """

    answers: list[Answer]
    plain: list[list[int]]
    rechecked: int
    timed: int
    tokens_per_s: float
    plain_tokens_per_s: float


def measure(
    algorithm: Algorithm,
    target: HfTarget,
    prompts: list[list[int]],
    *,
    limits: Limits,
    k: int,
    track: Track = untracked,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
) -> Measured:
    """Answer every prompt with the drafter and plainly."""
    return sweep(algorithm, target, prompts, limits=limits, ks=[k], track=track, sampling=sampling)[k]


def sweep(
    algorithm: Algorithm,
    target: HfTarget,
    prompts: list[list[int]],
    *,
    limits: Limits,
    ks: list[int],
    track: Track = untracked,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
) -> dict[int, Measured]:
    """As `measure`, once for each k; the plain answers are those of all."""
    timed = min(TIMED_PROMPTS, len(prompts))

    def plainly(prompt: list[int]) -> list[int]:
        return decode(target, prompt, limits, sampling.rule(prompt, target.device))

    plain, plain_s = _timed(plainly, track(prompts[:timed], "plain, timed"))
    plain_tokens_per_s = sum(map(len, plain)) / plain_s
    drafted: dict[int, tuple[list[Answer], float]] = {}
    for k in ks:

        def with_drafter(prompt: list[int], k: int = k) -> Answer:
            rule = sampling.rule(prompt, target.device)
            return decode_with_drafter(target, algorithm.proposer(), prompt, limits, k, rule)

        answers, seconds = _timed(with_drafter, track(prompts[:timed], f"k = {k}, timed"))
        rate = sum(len(answer.ids) for answer in answers) / seconds
        drafted[k] = answers + [with_drafter(prompt) for prompt in track(prompts[timed:], f"k = {k}")], rate

    differing: list[int] = []
    if sampling.temperature == 0:
        groups = [prompts[start : start + BATCH_PROMPTS] for start in range(timed, len(prompts), BATCH_PROMPTS)]
        plain += [ids for group in track(groups, "plain, in batches") for ids in decode_batch(target, group, limits)]
        differing = [
            index
            for index in range(timed, len(prompts))
            if any(answers[index].ids != plain[index] for answers, _ in drafted.values())
        ]
        for index in track(differing, "plain again, alone"):
            plain[index] = plainly(prompts[index])
    return {
        k: Measured(answers, plain, len(differing), timed, rate, plain_tokens_per_s)
        for k, (answers, rate) in drafted.items()
    }


def count(answers: list[Answer], k: int) -> tuple[int, int, list[float]]:
    """Drafts, accepted tokens, and the share of drafts that were accepted up to each position."""
    kept = [accepted for answer in answers for accepted in answer.accepted]
    return len(kept), sum(kept), [sum(one > position for one in kept) / max(len(kept), 1) for position in range(k)]


def _timed(function: Callable[[list[int]], T], prompts: Iterable[list[int]]) -> tuple[list[T], float]:
    started = time.perf_counter()
    results = [function(prompt) for prompt in prompts]
    return results, time.perf_counter() - started
