"""How many requests one server may have at once: found from what it shows of its load, or from how fast it answers.

Observations in, decisions out: no clock and no I/O. docs/decisions/0008-adaptive-concurrency.md says why these rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workers.gauges import Gauges
from workers.rate import Rate

MOST_WAITING = 0.10
"""Share of the running requests that may wait in the server. A few are right: a free slot is taken at once."""
SEEMS_TO_WAIT = 0.20
"""The same for a server without gauges, as a share of all requests."""
KV_GOAL = 0.85
KV_FULL = 0.95
KV_SMALL = 0.05
"""Below this use of the cache, more requests need no patience."""
START, STEP, SEEK, TRIAL = 2.0, 1.05, 1.25, 1.5
"""Factors: of increases at the start; later; later, where the cache shows how much room there is, or nothing shows
anything; and of all those that are judged at once, since 5 % more requests bring less than a rate wavers."""
LESS, OVERLOADED = 0.85, 0.75
WORTH = 1.02
"""An increase that does not bring this many times the tokens per second is taken back."""
SETTLE_LOOKS = 1
"""The first look after a change sees prompts that are read, not tokens that are made."""
MEMORY_LOOKS = 60
"""For so many looks (5 minutes at 5 seconds), a limit that was too much is not tried again; twice as many after each
increase in a row that was in vain, at most 8 times."""


@dataclass(frozen=True, slots=True)
class Change:
    """`recall` requests only wait in the server: they may as well wait here, or go elsewhere."""

    limit: int
    was: int
    because: str
    recall: int = 0


class Concurrency:
    """`pinned` is the limit that a person set: it is left only after an overload, and come back to."""

    def __init__(self, *, start: int = 16, most: int = 512, pinned: int | None = None) -> None:
        self.pinned = pinned
        self.limit = min(start, most) if pinned is None else pinned
        self.because = "start" if pinned is None else "pinned"
        self._most = most if pinned is None else pinned
        self._factor = START
        self._ceiling = self._most
        self._memory_looks = 0
        self._looks_since = 0
        self._changed_at = -math.inf
        self._preemptions: float | None = None
        self._in_vain = 0
        self._judged: tuple[int, float] | None = None
        """The last limit that proved worth it, and its tokens per second."""
        self._rate = Rate()
        self._is_going_up = True
        self._has_gained = False

    def configure(self, now: float, *, most: int, pinned: int | None) -> Change | None:
        """Other settings. An adaptive limit stays where it is, if it may."""
        is_pinned_anew = pinned is not None and pinned != self.pinned
        self.pinned = pinned
        self._most = most if pinned is None else pinned
        self._ceiling = min(self._ceiling, self._most) if self._memory_looks else self._most
        return self._set(now, self._most if is_pinned_anew else self.limit, "the settings say so")

    @property
    def speed(self) -> float:
        """Tokens per second of one request; 0 until one has ended."""
        return self._rate.speed

    def answered(self, now: float, tokens: int, seconds: float) -> None:
        """One of its answers came whole."""
        self._rate.answered(now, tokens, seconds)

    def overloaded(self, now: float, in_flight: int) -> Change | None:
        """It answered 429 or 503 to one of so many requests."""
        held = max(1, min(self.limit, in_flight))
        self._remember(held - 1)
        return self._set(now, int(OVERLOADED * held), "it answered 429 or 503")

    def look(self, now: float, *, in_flight: int, peak: int, gauges: Gauges | None) -> Change | None:
        """`in_flight` is now, `peak` the most since the last look: a limit that was not used is never raised."""
        gauges = gauges or Gauges()
        self._memory_looks = max(0, self._memory_looks - 1)
        if not self._memory_looks:
            self._ceiling = self._most
        self._looks_since += 1
        if in_flight > self.limit:  # a lower limit takes effect as answers end
            self._looks_since = 0
            self._rate.begin(now)
        is_settled = self._looks_since > SETTLE_LOOKS
        if self._looks_since >= SETTLE_LOOKS:
            self._rate.look(now, gauges)
        preempted = _rose(self._preemptions, gauges.preemptions)
        self._preemptions = gauges.preemptions
        if self.pinned is not None:
            return self._set(now, min(self._raised(STEP), self.pinned), "back to the pinned limit")
        if not is_settled:
            return None
        less = self._less(now, in_flight, gauges, preempted)
        if less or peak < self.limit:
            return less
        return self._seek(now) if gauges.waiting is None and gauges.kv is None else self._more(now, gauges)

    def _less(self, now: float, in_flight: int, gauges: Gauges, preempted: bool) -> Change | None:
        running, waiting, kv = gauges.running, gauges.waiting, gauges.kv
        if running is not None and waiting is not None and waiting > MOST_WAITING * running:
            # What it runs is what it can run: no need to feel the way down.
            enough = max(math.ceil(STEP * running), self.limit // 2)
            if enough < self.limit:
                self._remember(self.limit - 1)
                said = f"{waiting:.0f} waited in it while {running:.0f} ran"
                return self._set(now, enough, said, recall=max(0, in_flight - enough))
        is_felt = now - self._changed_at >= self._rate.lifetime_s / (4 if preempted else 2)
        if is_felt and (preempted or (kv is not None and kv > KV_FULL)):
            self._remember(int(0.95 * self.limit))
            said = "it preempted" if preempted else f"its KV cache was {kv:.0%} full"
            return self._set(now, int(LESS * self.limit), said)
        return None

    def _more(self, now: float, gauges: Gauges) -> Change | None:
        kv = gauges.kv or 0.0
        if gauges.waiting or kv >= KV_GOAL:
            self._factor = STEP
            return None
        if kv > KV_SMALL and now - self._changed_at < self._rate.lifetime_s:
            return None  # what was begun since then has not grown yet
        rate = self._rate.value(self.limit)
        if rate is not None:
            limit, known = self._judged or (self.limit, rate)
            if self.limit >= TRIAL * limit and rate < WORTH * known:
                self._judged = None
                if self._factor == START:  # half as many would be a wide step back, for a rate that has not settled
                    self._remember(self.limit)
                    return None
                self._in_vain += 1
                self._remember(limit)
                return self._set(now, limit, f"{self.limit} at once made {rate:.0f} tokens/s, {limit} made {known:.0f}")
            if self.limit >= TRIAL * limit or self.limit <= limit:
                self._in_vain = 0 if self.limit > limit else self._in_vain
                self._judged = self.limit, rate
        factor = self._factor
        if kv > KV_SMALL:  # half of the way that is left to the goal
            factor = min(max(factor, SEEK), max(STEP, 1 + (KV_GOAL / kv - 1) / 2))
        return self._set(now, max(self.limit, min(self._raised(factor), self._ceiling)), "it had room for more")

    def _seek(self, now: float) -> Change | None:
        """Without gauges: on in one direction while that is worth it, then a rest, then on again."""
        rate = self._rate.value(self.limit)
        waiting = self._rate.waiting(self.limit)
        if rate is None or waiting is None:
            return None
        if waiting > SEEMS_TO_WAIT * self.limit:
            enough = max(math.ceil(STEP * (self.limit - waiting)), self.limit // 2)
            self._judged = None
            self._rest()
            return self._set(now, enough, f"about {waiting:.0f} seemed to wait in it")
        if self._memory_looks:
            return None
        limit, known = self._judged or (self.limit, rate)
        if self.limit != limit:
            if rate < known * (WORTH if self.limit > limit else 2 - WORTH):
                self._in_vain += self._is_going_up
                self._turn()
                return self._set(now, limit, f"{self.limit} at once made {rate:.0f} tokens/s, {limit} made {known:.0f}")
            self._has_gained, self._in_vain = True, 0
        self._judged = self.limit, rate if self._is_going_up else max(rate, known)
        goal = self._raised(self._factor) if self._is_going_up else int(self.limit / self._factor)
        change = self._set(now, goal, "more may be faster" if self._is_going_up else "fewer may be as fast")
        if change is None:
            self._turn()
        return change

    def _turn(self) -> None:
        """At the start, if going up gained nothing, fewer are tried. Later only queues make it less."""
        if self._has_gained or not self._is_going_up:
            self._rest()
        else:
            self._is_going_up = False

    def _rest(self) -> None:
        self._remember(self._most)
        self._factor = SEEK
        self._is_going_up, self._has_gained = True, True

    def _raised(self, factor: float) -> int:
        return max(self.limit + 1, int(self.limit * factor))

    def _remember(self, ceiling: int) -> None:
        """More than this was too much."""
        self._factor = STEP
        self._ceiling, self._memory_looks = max(1, ceiling), MEMORY_LOOKS << min(self._in_vain, 3)

    def _set(self, now: float, limit: int, because: str, *, recall: int = 0) -> Change | None:
        was, self.limit = self.limit, max(1, min(limit, self._most))
        if self.limit == was:
            return None
        self.because = because
        self._looks_since = 0
        self._changed_at = now
        self._rate.begin(now)
        return Change(self.limit, was, because, recall)


def _rose(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now > before
