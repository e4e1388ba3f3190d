"""Rows that may have ended their worker take turns: one at a time, so that a worker that ends accuses one row only.

A row stands alone in its batch when the whole batch had kept ending its worker (draftfleet.reconcile). Had a worker
taken all rows of such a batch at once, each would count the next end as its own, and be given up with the bad one.

Beside a single row a worker holds whole batches, any of which may be why it ends. Before the last attempt the row is
cornered: the worker takes nothing new and finishes the rest first, since only then the row can be parked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from draftfleet.names import parent_of

LOOK_S = 0.2

TURN_S = 30.0
"""So long a row waits for its turn. Then others may come before it, since each that waits keeps the node from taking
another batch: a thousand rows that wait would be all that the node has."""


class Suspects:
    def __init__(self, draining: threading.Event) -> None:
        self.num_waiting = 0
        self.is_cornering = False
        self._draining = draining
        self._turn = threading.Lock()
        self._count = threading.Lock()

    @contextmanager
    def turn(self, batch: str) -> Generator[bool]:
        """Wait for the turn of a single row; a whole batch need not wait.

        False if the node drains meanwhile, or after TURN_S: then the row is to be put to the end of the queue.
        """
        if parent_of(batch)[1] is None:
            yield True
            return
        if not self._wait():
            yield False
            return
        try:
            yield True
        finally:
            self.is_cornering = False
            self._turn.release()

    def corner(self, is_alone: Callable[[], bool]) -> bool:
        """Wait, in a turn, until the node holds nothing else. False if it drains meanwhile."""
        self.is_cornering = True
        while not is_alone():
            if self._draining.wait(LOOK_S):
                return False
        return True

    def _wait(self) -> bool:
        self._add(1)
        end = time.monotonic() + TURN_S
        try:
            while not self._draining.is_set() and time.monotonic() < end:
                if self._turn.acquire(timeout=LOOK_S):
                    return True
            return False
        finally:
            self._add(-1)

    def _add(self, change: int) -> None:
        with self._count:
            self.num_waiting += change
