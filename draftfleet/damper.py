"""Keeps a fault that lasts for a week from filling the disk with the same line."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 30
"""So many lines of one kind are said as they come."""

REFILL_S = 30.0
"""After those, one line in this many seconds; that it stands for more, it says itself: `unsaid=57`."""

MOST_KINDS = 1000


@dataclass(slots=True)
class Kind:
    """`credit` lines may be said now."""

    credit: float
    at: float
    unsaid: int = 0


class Damper(logging.Filter):
    """Damps warnings and errors, and what is said of single rows. Lines about batches and states all come through.

    One for all handlers: a line is weighed once. `clock` is for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "is_said"):
            record.is_said = self._weigh(record)
        return bool(record.is_said)  # type: ignore[attr-defined]

    def _weigh(self, record: logging.LogRecord) -> bool:
        fields: dict[str, object] = getattr(record.msg, "fields", {})
        if record.levelno < logging.WARNING and "row" not in fields:
            return True
        name = record.name, record.levelno, str(getattr(record.msg, "text", record.msg))
        with self._lock:
            now = self._clock()
            if name not in self._kinds and len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()  # texts that never come twice: none of them is worth remembering
            kind = self._kinds.setdefault(name, Kind(BURST, now))
            kind.credit = min(BURST, kind.credit + (now - kind.at) / REFILL_S)
            kind.at = now
            if kind.credit < 1:
                kind.unsaid += 1
                return False
            kind.credit -= 1
            unsaid, kind.unsaid = kind.unsaid, 0
        if unsaid:
            record.unsaid = unsaid
        return True
