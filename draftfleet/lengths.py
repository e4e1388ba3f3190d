"""How long answers are, told from those that have ended and from those that are still being made.

The first answers to end are the short ones, so their mean is too small. An answer in flight says of its length that it
is larger than what there is of it: a censored observation. Kaplan and Meier's estimate takes both kinds.

    Kaplan, Meier: Nonparametric estimation from incomplete observations. J. Am. Stat. Assoc. 53 (1958), 457-481.

Lengths are counted in bins whose limits grow by 2 ** (1 / PER_OCTAVE), so that what a worker tells of them stays small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PER_OCTAVE = 16

FEWEST = 8
"""Answers that must have ended before anything is told of their length."""


def bin_of(tokens: float) -> int:
    """Bin 0 holds what is shorter than one token."""
    return 1 + int(PER_OCTAVE * math.log2(tokens)) if tokens >= 1 else 0


def tokens_of(number: int) -> float:
    """The lower limit of a bin."""
    return 2 ** ((number - 1) / PER_OCTAVE) if number else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The distribution of lengths: a share `survival[i]` of answers has at least `tokens[i]` tokens, both `(N,)`."""

    tokens: Floats
    survival: Floats

    @classmethod
    def of(cls, ended: Mapping[int, int], going: Mapping[int, int], max_tokens: int) -> Self | None:
        """From counts by bin. None where too few ended to tell.

        Past the longest that ended nothing was seen: it goes on at the pace of the longer half, up to `max_tokens`.
        """
        if sum(ended.values()) < FEWEST:
            return None
        num_bins = max(bin_of(max_tokens), *ended, *going) + 1
        num_ended, num_going = (
            np.array([counts.get(number, 0) for number in range(num_bins)]) for counts in (ended, going)
        )
        leaving = num_ended + num_going
        at_risk = leaving[::-1].cumsum()[::-1] - num_going / 2  # those in flight leave in the middle of their bin
        hazard = num_ended / np.maximum(at_risk, 1)
        survival = np.concatenate([[1.0], np.cumprod(1 - np.minimum(hazard, 1))])
        tokens = np.array([tokens_of(number) for number in range(num_bins + 1)])
        tokens[-1] = max(tokens[-2], max_tokens)
        return cls(tokens, _continued(tokens, survival, max(ended) + 1))

    @property
    def mean(self) -> float:
        return _area(self.tokens, self.survival)

    def beyond(self, tokens: float) -> float:
        """How many more an answer makes that has so many, as expected."""
        share = float(self.at(tokens))
        longer = self.tokens > tokens
        here = np.concatenate([[tokens], self.tokens[longer]]), np.concatenate([[share], self.survival[longer]])
        return _area(*here) / share if share > 0 else 0.0

    def at(self, tokens: Floats | float) -> Floats:
        """The share of answers that are at least so long."""
        return np.asarray(np.interp(tokens, self.tokens, self.survival, right=0.0))

    def in_flight(self, num: int) -> Floats:
        """`(num,)` tokens of answers in flight where many have begun and ended before: quantiles of their age, each as
        likely as an answer is to get there."""
        steps = _areas(self.tokens, self.survival)
        reached = np.concatenate([[0.0], steps.cumsum()]) / steps.sum()
        return np.interp((np.arange(num) + 0.5) / num, reached, self.tokens)

    def until_all_ended(self, begun: Floats, speeds: Floats) -> float:
        """Seconds until the last of these answers ends, as expected; of each, `(M,)`, its tokens and tokens/s."""
        if not len(begun):
            return 0.0
        seconds = self.tokens / speeds.min()
        share = np.maximum(self.at(begun), 1e-12)[:, None]
        goes_on = np.clip(self.at(begun[:, None] + speeds[:, None] * seconds) / share, 0.0, 1.0)  # (M, N)
        return _area(seconds, 1 - np.prod(1 - goes_on, axis=0))


def _areas(x: Floats, y: Floats) -> Floats:
    """Under the line through the points, from each to the next."""
    return np.diff(x) * (y[1:] + y[:-1]) / 2


def _area(x: Floats, y: Floats) -> float:
    return float(_areas(x, y).sum())


def _continued(tokens: Floats, survival: Floats, seen: int) -> Floats:
    """From `seen` on, as an exponential that falls as fast as between the middle of what was seen and its end."""
    last = survival[seen]
    if last > 0:
        middle = int(np.argmax(survival <= (1 + last) / 2))
        span = tokens[seen] - tokens[middle]
        pace = math.log(survival[middle] / last) / span if span > 0 else -math.log(last) / max(tokens[seen], 1.0)
        survival[seen:] = last * np.exp(-pace * (tokens[seen:] - tokens[seen]))
    return survival
