"""Tokens per second of one server at its present limit: from its own counter, else from how long its answers took."""

from __future__ import annotations

import math

from workers.gauges import Gauges

JUDGED_ANSWERS = 4
"""Without a counter, a limit is judged by this many answers, or by a quarter of the limit if that is more."""
LIFETIME_MEMORY = 0.96


class Rate:
    def __init__(self) -> None:
        self._begun_at = -math.inf
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None
        self._line = Line()
        self._answers = 0
        self._tokens = 0
        self._sum_s = 0.0
        self._sum_s2 = 0.0
        self._sum_tokens = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second of one request, over the last answers. 0 until one has ended."""
        return self._sum_tokens / self._sum_s if self._sum_s else 0.0

    @property
    def lifetime_s(self) -> float:
        """How long the requests that are at work take in all, on average: long ones are at work for longer."""
        return self._sum_s2 / self._sum_s if self._sum_s else 0.0

    def begin(self, now: float) -> None:
        """What was before counts no more: the limit was another."""
        self._begun_at = now
        self._first = self._last = None
        self._line = Line()

    def look(self, now: float, gauges: Gauges) -> None:
        if not gauges.tokens_are_live or gauges.generated_tokens is None:
            return
        if self._last is not None and gauges.generated_tokens < self._last[1]:
            self._first = None  # it was restarted
        self._last = now, gauges.generated_tokens
        self._first = self._first or self._last

    def answered(self, now: float, tokens: int, seconds: float) -> None:
        self._sum_s = LIFETIME_MEMORY * self._sum_s + seconds
        self._sum_s2 = LIFETIME_MEMORY * self._sum_s2 + seconds**2
        self._sum_tokens = LIFETIME_MEMORY * self._sum_tokens + tokens
        self._answers += 1
        self._tokens += tokens
        if now - seconds >= self._begun_at:
            self._line.add(tokens, seconds)

    def value(self, limit: int) -> float | None:
        """None until enough was seen.

        By Little's law, tokens per second are requests at once * tokens of a mean answer / its seconds. The first
        answers to end are short ones, so the seconds of a mean answer are read off a line through theirs.
        """
        if self._first is not None and self._last is not None:
            seconds = self._last[0] - self._first[0]
            return (self._last[1] - self._first[1]) / seconds if seconds > 0 else None
        seconds = self._line.at(self._mean) if self._is_judged(limit) else 0.0
        return limit * self._mean / seconds if seconds > 0 else None

    def waiting(self, limit: int) -> float | None:
        """How many of so many requests seem to wait for their turn: the seconds that an answer of no tokens would take.

        None until enough answers were seen.
        """
        seconds = self._line.at(self._mean) if self._is_judged(limit) else 0.0
        return limit * self._line.at(0) / seconds if seconds > 0 else None

    @property
    def _mean(self) -> float:
        return self._tokens / self._answers if self._answers else 0.0

    def _is_judged(self, limit: int) -> bool:
        return self._line.count >= max(JUDGED_ANSWERS, limit / 4)


class Line:
    """The least-squares line of seconds over tokens; through the origin where they do not tell a slope."""

    def __init__(self) -> None:
        self.count = 0
        self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.count += 1
        self._x += tokens
        self._y += seconds
        self._xx += tokens * tokens
        self._xy += tokens * seconds

    def at(self, tokens: float) -> float:
        spread = self.count * self._xx - self._x**2
        slope = (self.count * self._xy - self._x * self._y) / spread if spread > 0 else -1.0
        offset = (self._y - slope * self._x) / self.count
        if slope <= 0 or offset < 0:
            return tokens * self._y / self._x if self._x else 0.0
        return offset + slope * tokens
