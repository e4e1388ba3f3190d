"""Signals to the parent of a fleet: the first drains, a second one hurries, a third one ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """A context manager for the main thread. The first signal raises KeyboardInterrupt, the second calls `hurry`.

    A terminal that closes is such a signal, too (SIGHUP), unless the process was told to ignore it, as by nohup.
    """

    def __init__(self, *, ignores_hangup: bool = False) -> None:
        self.hurry: Callable[[], object] = lambda: None
        self.code = 0
        """Of the exit, by the first signal: 130 after Ctrl-C. 0: there was none."""
        self._ignores_hangup = ignores_hangup
        self._num_told = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in STOP:
            ignored = number == signal.SIGHUP and (self._ignores_hangup or signal.getsignal(number) is signal.SIG_IGN)
            self._before[number] = signal.signal(number, signal.SIG_IGN if ignored else self._told)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        self._num_told += 1
        if self._num_told == 1:
            self.code = 128 + number
            raise KeyboardInterrupt
        if self._num_told == 2:
            self.hurry()
        else:
            os._exit(self.code)  # the kernel ends the children
