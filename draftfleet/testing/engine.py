"""The time that answers take: continuous batching in a server with slots and a KV cache, as a model without a clock.

All sequences at work share the engine evenly. A sequence alone needs `latency_s` + prompt tokens *
`seconds_per_prompt_token` + tokens * `seconds_per_token` of work; with n at work, each does

    speed * time_scale / (1 + (n - 1) / half_speed_at)

seconds of it per second. So n sequences make n / (1 + (n - 1) / half_speed_at) times the tokens of one, which rises
with n and saturates at `half_speed_at` times.

`_work` is the seconds of work that a sequence has done that was there from the beginning. As all advance alike, a
sequence ends when `_work` has grown by what it needs, whoever comes and goes: ends stand in one heap, and nothing is
done per token. Moments (`now`) are seconds of any clock that the caller keeps to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

ROUNDING = 1e-6
"""Of sums of tokens."""


class Pace(Protocol):
    """What the engine reads of a `Behaviour`."""

    @property
    def slots(self) -> int | None: ...
    @property
    def kv_tokens(self) -> int | None: ...
    @property
    def latency_s(self) -> float: ...
    @property
    def seconds_per_prompt_token(self) -> float: ...
    @property
    def seconds_per_token(self) -> float: ...
    @property
    def half_speed_at(self) -> float | None: ...
    @property
    def speed(self) -> float: ...
    @property
    def time_scale(self) -> float: ...
    @property
    def frozen(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine."""

    prompt_tokens: int
    tokens: int
    """Of the answer."""
    ended_at: float | None = None
    """The moment of its last token."""
    kept: float = 0.0
    """Tokens it had made when it was preempted."""
    seconds_per_token: float = 0.0
    first: float = field(default=0.0, init=False)
    """The work at which its first token, since it was let in, begins."""
    end: float = field(default=0.0, init=False)
    """The work at which it ends."""
    order: int = field(default=0, init=False)

    def made(self, work: float) -> float:
        """Tokens made so far. A token counts as it is begun, so between two of them there are fractions."""
        if work >= self.end:
            return self.tokens
        if work <= self.first or not self.seconds_per_token:
            return self.kept
        return min(self.kept + (work - self.first) / self.seconds_per_token, self.tokens)


class Engine:
    """First come, first served. Whoever lets time pass gets the sequences that ended meanwhile."""

    def __init__(self, pace: Pace, now: float) -> None:
        self.preemptions = 0
        self.peak = 0
        self._pace = pace
        self._now = now
        self._work = 0.0
        self._ends: list[tuple[float, int, Sequence]] = []
        self._running: dict[Sequence, None] = {}
        self._waiting: deque[Sequence] = deque()
        self._order = count()
        self._full = float("inf")
        """The work at which the KV cache may be full."""
        self._past_tokens = 0.0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def generated(self) -> float:
        """Tokens made since it started, also those of sequences that were taken out."""
        held = sum(sequence.made(self._work) for sequence in self._running)
        return self._past_tokens + held + sum(sequence.kept for sequence in self._waiting)

    def made(self, sequence: Sequence) -> float:
        """Its tokens so far."""
        return sequence.made(self._work) if sequence in self._running else sequence.kept

    @property
    def held_tokens(self) -> float:
        """Tokens in the KV cache."""
        return sum(sequence.prompt_tokens + sequence.made(self._work) for sequence in self._running)

    @property
    def kv_usage(self) -> float:
        """From 0 to 1; 0 where the cache has no limit."""
        return min(self.held_tokens / self._pace.kv_tokens, 1.0) if self._pace.kv_tokens else 0.0

    def add(self, sequence: Sequence, now: float) -> list[Sequence]:
        ended = self.advance(now)
        self._waiting.append(sequence)
        return ended + self.advance(now)

    def remove(self, sequence: Sequence, now: float) -> list[Sequence]:
        """The client has gone."""
        ended = self.advance(now)
        if sequence in self._running:
            self._take_out(sequence)
            self._ends = [entry for entry in self._ends if entry[2] is not sequence]
            heapify(self._ends)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            self._past_tokens += sequence.kept
        return ended + self.advance(now)

    def clear(self) -> list[Sequence]:
        """Take all out, as they are. Returns them."""
        lost = [*self._running, *self._waiting]
        self._past_tokens = self.generated
        self._running.clear()
        self._waiting.clear()
        self._ends.clear()
        return lost

    def change(self, pace: Pace, now: float) -> list[Sequence]:
        """From now on another pace. What a sequence at work needs stays as it is; how fast it gets it changes."""
        ended = self.advance(now)
        self._pace = pace
        return ended + self.advance(now)

    def advance(self, now: float) -> list[Sequence]:
        """Let time pass. Returns the sequences that ended, in order, each with the moment of its end."""
        ended: list[Sequence] = []
        self._let_in()
        while (at := self.next_at()) is not None and at <= now:
            self._work, self._now = max(self._work, self._next_work()), max(self._now, at)
            ended += self._end()
            if self._work >= self._full:
                self._preempt()
            self._let_in()
        self._work += max(now - self._now, 0.0) * self._rate()
        self._now = max(now, self._now)
        return ended

    def next_at(self) -> float | None:
        """The moment at which `advance` has something to do, if nothing else happens before."""
        rate, work = self._rate(), self._next_work()
        if not self._running or not rate:
            return None
        return self._now + max(work - self._work, 0.0) / rate

    def _rate(self) -> float:
        """Seconds of work per second, of each sequence."""
        pace = self._pace
        others = max(len(self._running) - 1, 0)
        slowdown = 1 + others / pace.half_speed_at if pace.half_speed_at else 1.0
        return 0.0 if pace.frozen else pace.speed * pace.time_scale / slowdown

    def _next_work(self) -> float:
        first = self._ends[0][0] if self._ends else float("inf")
        return min(first, self._full)

    def _end(self) -> Iterator[Sequence]:
        while self._ends and self._ends[0][0] <= self._work:
            sequence = heappop(self._ends)[2]
            sequence.ended_at = self._now
            self._take_out(sequence)
            yield sequence

    def _take_out(self, sequence: Sequence) -> None:
        self._past_tokens += sequence.made(self._work)
        del self._running[sequence]

    def _let_in(self) -> None:
        """Free slots go to those who wait, if what they bring fits into the cache. The first is never passed by."""
        pace = self._pace
        while self._waiting and (pace.slots is None or len(self._running) < pace.slots):
            sequence = self._waiting[0]
            # Room for one more token of each, or the youngest would be put out again at once.
            if pace.kv_tokens and self._running:
                brings = sequence.prompt_tokens + sequence.kept
                if self.held_tokens + brings + len(self._running) + 1 > pace.kv_tokens:
                    break
            self._waiting.popleft()
            self._start(sequence)
        self.peak = max(self.peak, len(self._running))
        self._look_ahead()

    def _start(self, sequence: Sequence) -> None:
        """What a preempted one had made is prompt now: it is computed again, not generated again."""
        pace = self._pace
        brings = sequence.prompt_tokens + sequence.kept
        sequence.seconds_per_token = pace.seconds_per_token
        sequence.first = self._work + pace.latency_s + brings * pace.seconds_per_prompt_token
        sequence.end = sequence.first + (sequence.tokens - sequence.kept) * pace.seconds_per_token
        self._running[sequence] = None
        heappush(self._ends, (sequence.end, next(self._order), sequence))

    def _preempt(self) -> None:
        """While the cache is over its limit, the youngest sequence makes room and waits, as the first in the queue."""
        assert self._pace.kv_tokens is not None
        while len(self._running) > 1 and self.held_tokens > self._pace.kv_tokens - ROUNDING:
            youngest = next(reversed(self._running))
            youngest.kept = youngest.made(self._work)
            del self._running[youngest]
            self._ends = [entry for entry in self._ends if entry[2] is not youngest]
            heapify(self._ends)
            self._waiting.appendleft(youngest)
            self.preemptions += 1

    def _look_ahead(self) -> None:
        """When the cache can be full at the earliest: each at work grows by one token per token's time.

        Those that are still at their prompt do not, so it may be early; then `advance` looks again.
        """
        pace = self._pace
        self._full = float("inf")
        if pace.kv_tokens and len(self._running) > 1:
            grows = sum(1 / s.seconds_per_token for s in self._running if s.seconds_per_token)
            if grows:
                room = max(pace.kv_tokens - self.held_tokens, 0.0)
                self._full = self._work + max(room, 1.0) / grows
