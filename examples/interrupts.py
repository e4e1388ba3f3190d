"""Ctrl-C: told at once, ended in good order; at the second one, ended at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

CODE = 128 + signal.SIGINT
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Raises KeyboardInterrupt at a signal; at the next one the process ends, and the kernel ends its children."""

    def __init__(self) -> None:
        self._has_bars = False

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._first)

    @contextmanager
    def during_bars(self) -> Generator[None]:
        """Around bars that move: they would erase a line that is written between them, so it is written below them."""
        try:
            self._has_bars = True
            yield
        except KeyboardInterrupt:
            _tell_stopping()
            raise
        finally:
            self._has_bars = False

    def _first(self, number: int, frame: FrameType | None) -> None:
        for one in SIGNALS:
            signal.signal(one, _second)
        if not self._has_bars:
            _tell_stopping()
        raise KeyboardInterrupt


def _second(number: int, frame: FrameType | None) -> None:
    _write("Ended at once. The next start goes on from what was stored.")
    os._exit(CODE)


def _tell_stopping() -> None:
    _write("stopping: work in flight is put aside (Ctrl-C again ends it at once)")


def _write(text: str) -> None:
    """For handlers: printing may be what they interrupt."""
    os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
