"""How fast a stage advances and when it ends, from what was seen of it here."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
"""Younger progress than this makes the rate: training is faster once the samples are all there."""
TRUSTED_S = 5.0
"""Progress over a shorter time tells nothing yet."""


class Estimate:
    """The clock starts with the first progress, so what an earlier start did counts for nothing; it rests in waits."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._first: int | None = None
        self._noted_at = 0.0
        self._active_s = 0.0

    def note(self, completed: int, now: float, *, waiting: bool) -> None:
        if self._seen and not waiting:
            self._active_s += now - self._noted_at
        self._noted_at = now
        if self._first is None:
            self._first = completed
        if completed <= (self._seen[-1][1] if self._seen else self._first):
            return
        self._seen.append((self._active_s, completed))
        while len(self._seen) > 2 and self._active_s - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()

    @property
    def rate(self) -> float | None:
        """Progress per second, None until it can be told."""
        if not self._seen:
            return None
        (since_s, first), (_, last) = self._seen[0], self._seen[-1]
        seconds = self._active_s - since_s
        return (last - first) / seconds if last > first and seconds >= TRUSTED_S else None

    def left_s(self, total: int | None) -> float | None:
        if total is None or self.rate is None:
            return None
        return max(0, total - self._seen[-1][1]) / self.rate
