"""What the node does while the shared storage cannot be written: it pauses, says so, and tries again until it can.

It pauses before the folder is full, too: what is left then is for the rows that are in flight.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from draftfleet.errors import StorageUnreadable, StorageUnwritable
from draftfleet.logs import event
from draftfleet.storage import Storage

log = logging.getLogger(__name__)
T = TypeVar("T")

PAUSING = (StorageUnwritable, StorageUnreadable, OSError)
"""Faults of the shared folder that pass: nothing is given up for them."""

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 20.0
SAY_AGAIN_S = 60.0

GB = 1e9
SPACE_S = 5.0
"""Seconds between two looks at the free space."""

GOES_ON = 1.1
"""So much more than the least must be free before a node goes on, or it would start and stop all the time."""


class Guard:
    """Every access to the storage goes through `run`. While one of them fails, the node is paused."""

    def __init__(self, on_change: Callable[[], object]) -> None:
        self._on_change = on_change
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._blocked = 0
        self._since = 0.0
        self._said = 0.0
        self._error = ""
        self._is_short = False

    @property
    def reason(self) -> str:
        """Why it is blocked; empty if it is not."""
        return self._error if self.is_blocked else ""

    @property
    def is_blocked(self) -> bool:
        return self._blocked > 0

    def run(self, what: str, action: Callable[[], T]) -> T:
        """Do it, again and again if the folder is at fault.

        Raises the folder's error only once `give_up` was called; any other error at once.
        """
        delay_s = FIRST_DELAY_S
        waiting = False
        try:
            while True:
                try:
                    return action()
                except FileNotFoundError:
                    raise
                except PAUSING as error:
                    waiting = waiting or self._block()
                    self._say(what, error)
                    if self._stopping.wait(delay_s * random.uniform(0.7, 1.0)):
                        raise
                    delay_s = min(delay_s * 2, LONGEST_DELAY_S)
        finally:
            if waiting:
                self._unblock()

    def watch(self, storage: Storage, min_free_gb: float) -> None:
        """A chore: pause while the folder has less room than this. Nothing that is written meanwhile waits for it."""
        try:
            free_bytes = storage.free_bytes() if min_free_gb else None
        except StorageUnreadable:  # whoever needs it says so
            return
        if free_bytes is None:
            return
        if not self._is_short and free_bytes < min_free_gb * GB:
            self._is_short = self._block()
        elif self._is_short and free_bytes >= min_free_gb * GB * GOES_ON:
            self._is_short = False
            self._unblock()
        if self._is_short:
            self._say("looking at the free space", _short(storage, free_bytes, min_free_gb))

    def give_up(self) -> None:
        """The worker is told to stop: nobody waits for the folder any longer."""
        self._stopping.set()

    def _block(self) -> bool:
        with self._lock:
            self._blocked += 1
            if self._blocked == 1:
                self._since, self._said = time.monotonic(), 0.0
        self._on_change()
        return True

    def _unblock(self) -> None:
        with self._lock:
            self._blocked -= 1
            over = self._blocked == 0
        if over:
            log.info(event("storage reached again", seconds=time.monotonic() - self._since))
        self._on_change()

    def _say(self, what: str, error: Exception) -> None:
        with self._lock:
            now = time.monotonic()
            self._error = str(error)
            due = not self._said or now - self._said >= SAY_AGAIN_S
            if due:
                self._said = now
        if due:
            log.error(event("worker paused", at=what, seconds=now - self._since, error=str(error)))


def _short(storage: Storage, free_bytes: int, min_free_gb: float) -> StorageUnwritable:
    return StorageUnwritable(
        f"{storage.url} has {free_bytes / GB:.2f} GB left, and storage.min_free_gb = {min_free_gb:g}: make room. "
        "Rows in flight are still written, no new ones are asked; work goes on by itself."
    )
