"""Whether a server has stopped to work on what it holds of ours, though it may still answer looks.

Observations in, a verdict out: no clock and no I/O. Health pages lie both ways; counters do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.gauges import Gauges


@dataclass(frozen=True, slots=True)
class Patience:
    stall_s: float = 90.0
    ghost_s: float = 30.0


class Watch:
    """Of one server. A request that waits in it for others to end is no stall: its counters rise for those."""

    def __init__(self) -> None:
        self._seen: tuple[int, float | None] | None = None
        self._moved_at = 0.0
        self._silent_since: float | None = None
        self._empty_since: float | None = None
        self._holds = False

    def silent_s(self, now: float) -> float:
        """Seconds for which it has neither ended a request of ours nor moved its counters; 0 while it holds none."""
        return now - self._moved_at if self._seen and self._holds else 0.0

    def look(
        self, now: float, *, held: int, ended: int, gauges: Gauges | None, is_heard: bool, patience: Patience
    ) -> str | None:
        """Why what we hold there should be taken back, if it should.

        `held` are our requests in it, `ended` counts those it is through with. `is_heard`: it answered this look.
        """
        self._holds = held > 0
        steps = gauges.steps if gauges is not None and is_heard else None
        seen = (ended, self._seen[1] if self._seen and not is_heard else steps)
        if not held or seen != self._seen:
            self._seen, self._moved_at, self._empty_since = seen, now, None
        if is_heard or not held:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        if not held:
            return None
        return self._ghost(now, gauges if is_heard else None, patience) or self._stall(now, steps, patience)

    def _ghost(self, now: float, gauges: Gauges | None, patience: Patience) -> str | None:
        if gauges is None or gauges.running is None or gauges.waiting is None or gauges.running + gauges.waiting > 0:
            self._empty_since = None
            return None
        self._empty_since = now if self._empty_since is None else self._empty_since
        if now - self._empty_since < patience.ghost_s:
            return None
        self._begin_again(now)
        return f"it says that it works on nothing, for worker.ghost_s = {patience.ghost_s:g} s"

    def _stall(self, now: float, steps: float | None, patience: Patience) -> str | None:
        if self._silent_since is not None:
            is_over = now - max(self._silent_since, self._moved_at) >= patience.stall_s
            said = "it answered no look"
        else:
            is_over = steps is not None and now - self._moved_at >= patience.stall_s
            said = "its counters stood still"
        if not is_over:
            return None
        self._begin_again(now)
        return f"{said} for worker.stall_s = {patience.stall_s:g} s"

    def _begin_again(self, now: float) -> None:
        self._moved_at, self._empty_since, self._silent_since = now, None, None
