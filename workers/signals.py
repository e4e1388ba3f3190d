"""SIGTERM and Ctrl-C drain, a second one hurries, a third one ends at once. SIGHUP reads the settings again.

A Python signal handler may run between any two instructions of the main thread, while it holds any lock. So handlers
only put into a queue that may be entered again, and a thread of its own acts.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

from draftfleet.errors import DraftfleetError
from draftfleet.logs import event

log = logging.getLogger(__name__)

STOP = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """A context manager for the main thread. `on_stop` is called at the first and at the second signal to stop.

    A SIGHUP that comes before `listen` is acted on then.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.on_stop: Callable[[], object] = lambda: None
        self._on_reload: Callable[[], object] | None = None
        self._is_listening = threading.Event()
        self._queue: SimpleQueue[int] = SimpleQueue()
        self._before: dict[int, Any] = {}
        self._num_stops = 0
        self.waits_to_reload = False

    def __enter__(self) -> Self:
        for signum in (*STOP, signal.SIGHUP):
            self._before[signum] = signal.signal(signum, self._handle)
        threading.Thread(target=self._main, name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._queue.put(0)

    def listen(self, on_stop: Callable[[], object], on_reload: Callable[[], object] | None) -> None:
        """From now on there is somebody who can be stopped and told to read the settings again."""
        self.on_stop, self._on_reload = on_stop, on_reload
        self._is_listening.set()
        if self.waits_to_reload:
            self._queue.put(signal.SIGHUP)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._queue.put(signum)

    def _main(self) -> None:
        while signum := self._queue.get():
            try:
                self._stop(signum) if signum in STOP else self._reload()
            except Exception:
                log.exception(event("signal not handled", signal=signal.Signals(signum).name))

    def _stop(self, signum: int) -> None:
        self._num_stops += 1
        log.info(event("signal received", signal=signal.Signals(signum).name, times=self._num_stops))
        self.stopping.set()
        if self._num_stops >= 3:
            os._exit(1)
        self.on_stop()

    def _reload(self) -> None:
        if not self._is_listening.is_set():
            self.waits_to_reload = True
            return
        if self._on_reload is None:
            log.warning(event("settings not reloaded", reason="this worker was started without a settings file"))
            return
        try:
            self._on_reload()
        except DraftfleetError as error:
            log.error(event("settings not reloaded", error=str(error)))
