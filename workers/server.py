"""One inference server as this worker knows it: what it serves, how much it gets, and whether it may get more."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field
from typing import Any

from draftfleet.live import ServerState
from draftfleet.logs import event
from workers import dialects
from workers.concurrency import Change, Concurrency
from workers.dialects import Dialect
from workers.dialects.openai import model_entries
from workers.gauges import Gauges
from workers.watch import Watch

log = logging.getLogger(__name__)

LONGEST_HOLD_S = 60.0
BREAK_AFTER = 10
"""Answers in a row that broke off. Fewer happen to a sound server: a burst of bad luck costs each row one try."""
FIRST_REST_S, LONGEST_REST_S = 2.0, 60.0
SPEED_MEMORY = 0.05
"""Weight of the newest answer in a server's measured speed."""


@dataclass(slots=True, eq=False)
class Server:
    """`cleared` names the runs whose canary it has passed since it was last seen to come up.

    While it `is_kept` for one row, it gets no other.
    """

    url: str
    concurrency: Concurrency = field(default_factory=Concurrency)
    is_named: bool = True
    state: ServerState = "waiting"
    reason: str = "not looked at yet"
    dialect: Dialect = field(default_factory=lambda: dialects.load("openai"))
    models: dict[str, Any] = field(default_factory=dict[str, Any])
    context_tokens: int | None = None
    gauges: Gauges | None = None
    watch: Watch = field(default_factory=Watch)
    in_flight: int = 0
    peak: int = 0
    """The most in flight since the last look."""
    ended: int = 0
    """Requests that ended by themselves, in whatever way."""
    trials: int = 0
    """Canaries that it is being asked."""
    suspects: int = 0
    is_kept: bool = False
    rows: int = 0
    tokens: int = 0
    seconds_per_token: float | None = None
    cleared: set[str] = field(default_factory=set[str])
    refused: bool = False
    failures: int = 0
    said: float = 0.0
    since: float = field(default_factory=time.monotonic)
    was_ready: bool = False
    is_late: bool = False
    rests: int = 0
    """How often it was let rest since a row was last answered."""
    _broken: int = 0
    _overloads: int = 0
    _held_until: float = 0.0
    _resting_until: float = 0.0

    @property
    def limit(self) -> int:
        """How many requests it may have at once, as of now."""
        return self.concurrency.limit

    @property
    def serves(self) -> list[str]:
        return [str(entry["id"]) for entry in model_entries(self.models)]

    @property
    def held_s(self) -> float:
        """Seconds for which it asked to get nothing new."""
        return max(0.0, self._held_until - time.monotonic())

    @property
    def rest_s(self) -> float:
        """Seconds for which it is asked nothing at all."""
        return max(0.0, self._resting_until - time.monotonic())

    def can_take(self, run_id: str, *, alone: bool) -> bool:
        """Whether a slot is free for a row of this run; for a suspect (`alone`), only if it holds no other suspect."""
        return (
            self.state == "ready"
            and run_id in self.cleared
            and self.in_flight < self.limit
            and not (alone and self.suspects)
            and not self.is_kept
            and not self.held_s
        )

    def begin(self, *, is_suspect: bool) -> None:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        self.suspects += is_suspect

    def completed(self, tokens: int, seconds: float) -> None:
        self.ended += 1
        self.rows += 1
        self.tokens += tokens
        self._overloads = self._broken = self.rests = 0
        if tokens > 0:
            self.concurrency.answered(time.monotonic(), tokens, seconds)
            measured = seconds / tokens
            known = self.seconds_per_token
            self.seconds_per_token = measured if known is None else known + SPEED_MEMORY * (measured - known)

    def overloaded(self, retry_after_s: float | None) -> float:
        """It answered 429 or 503: a lower limit, and nothing new for a while. Returns for how many seconds.

        A burst of refusals counts once.
        """
        if not self.held_s:
            self.changed(self.concurrency.overloaded(time.monotonic(), self.in_flight + 1))
            hold_s = min(LONGEST_HOLD_S, 0.5 * 2**self._overloads) * random.uniform(0.5, 1.0)
            self._overloads += 1
            self._held_until = time.monotonic() + hold_s
        if retry_after_s is not None:
            self._held_until = max(self._held_until, time.monotonic() + min(retry_after_s, 10 * LONGEST_HOLD_S))
        return self.held_s

    def broke(self) -> bool:
        """An answer broke off. True if that were too many in a row. A refused row, 4xx, is none of them."""
        self._broken += 1
        return self._broken >= BREAK_AFTER and not self.rest_s

    def rest(self) -> float:
        """It is asked nothing for a while, longer each time, then a question of our own. Returns for how long, in s."""
        longest_s = min(LONGEST_REST_S, FIRST_REST_S * 2**self.rests)
        self._resting_until = time.monotonic() + longest_s * random.uniform(0.5, 1.0)
        self.rests += 1
        self._broken = 0
        self.cleared.clear()
        return self.rest_s

    def look(self) -> int:
        """Let the limit follow what the last look saw. Returns how many requests should be taken back."""
        change = self.concurrency.look(time.monotonic(), in_flight=self.in_flight, peak=self.peak, gauges=self.gauges)
        self.peak = self.in_flight
        self.changed(change)
        return change.recall if change else 0

    def changed(self, change: Change | None) -> None:
        if change:
            fields = {"limit": change.limit, "was": change.was, "because": change.because}
            log.info(event("concurrency changed", server=self.url, **fields))
