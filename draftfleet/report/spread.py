"""Amounts over time: what a request made is spread evenly over the time that it took."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

MOST_BINS = 144
WIDTHS = (
    *(1, 2, 5, 10, 15, 30),
    *(60 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12, 24)),
)
"""In seconds. A run that is longer than these allow has bins of whole days."""


class Times:
    """From `start` to `end` in bins of `width` seconds, which begin at a multiple of it."""

    def __init__(self, first: float, last: float) -> None:
        days = 86400 * max(1, -(-(last - first) // (86400 * MOST_BINS)))
        self.width = next((width for width in WIDTHS if (last - first) / width <= MOST_BINS), days)
        self.start = first // self.width * self.width
        self.count = int((last - self.start) // self.width) + 1
        self.end = self.start + self.count * self.width

    def bin(self, at: float) -> int:
        return min(self.count - 1, max(0, int((at - self.start) / self.width)))

    def part(self, at: float) -> float:
        """Where a moment lies, from 0 at the start to 1 at the end."""
        return min(1.0, max(0.0, (at - self.start) / (self.end - self.start)))

    def middles(self) -> list[float]:
        return [self.start + (number + 0.5) * self.width for number in range(self.count)]


class Spread:
    """An amount per bin. An entry costs the same however many bins it covers."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._here = [0.0] * times.count
        self._onward = [0.0] * (times.count + 1)

    def add(self, start: float, end: float, amount: float) -> None:
        times = self._times
        first, last = times.bin(start), times.bin(end)
        if first == last or end <= start:
            self._here[last] += amount
            return
        rate = amount / (end - start)
        self._here[first] += rate * (times.start + (first + 1) * times.width - start)
        self._here[last] += rate * (end - times.start - last * times.width)
        self._onward[first + 1] += rate * times.width
        self._onward[last] -= rate * times.width

    def values(self) -> list[float]:
        return [max(0.0, here + on) for here, on in zip(self._here, accumulate(self._onward), strict=False)]

    def per_second(self) -> list[float]:
        return [value / self._times.width for value in self.values()]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of them was under way."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
