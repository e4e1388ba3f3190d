"""Hidden states ahead of training: a thread captures the next batches while the step at hand computes.

The thread draws rows from the feed and runs the target; the loop takes what it made, in the same order. Grad mode,
autocast and streams are a thread's own: capture has torch's defaults, as it has in the loop, and on a GPU a stream
beside the one that trains. Whoever captures must draw no random numbers, so the result is the same bit for bit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

import torch

from draftfleet.logs import event
from draftfleet.settings import Trainer
from trainer.data import Feed
from trainer.targets import Captured

log = logging.getLogger(__name__)

IDLE_S = 0.2
"""Between two words about a wait."""

END_S = 10.0
"""How long a capture may take to end when the training does."""


class Made(NamedTuple):
    """What the thread has for the loop: a batch, and the event after which it is there; or how it ended."""

    captured: list[Captured] | None = None
    there: torch.cuda.Event | torch.Event | None = None
    error: BaseException | None = None


def depth_of(knobs: Trainer, device: torch.device) -> int:
    """Batches to capture ahead: on a CPU a target in this process would compute on the cores that train."""
    if knobs.prefetch is not None:
        return knobs.prefetch
    return 0 if knobs.target == "hf" and device.type == "cpu" else 2


class Prefetch:
    """Captured batches, at most `depth` of them ahead of who takes them; 0 is without a thread.

    `waited_s` is how long the loop stood still for hidden states, `starved_s` how long for samples. What the thread
    raises is raised where its batch would have come. `on_idle` is told so, by the loop, while there
    are no samples.
    """

    def __init__(
        self,
        captured: Iterator[list[Captured]],
        feed: Feed,
        *,
        depth: int,
        device: torch.device,
        on_idle: Callable[[Feed], None] = lambda _: None,
    ) -> None:
        self.waited_s = 0.0
        self.starved_s = 0.0
        self._captured = captured
        self._feed = feed
        self._depth = depth
        self._device = device
        self._on_idle = on_idle
        self._made = deque[Made]()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True) if depth else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(END_S)
            if self._thread.is_alive():
                log.warning(event("capture did not end", seconds=END_S))
                return
        else:
            self._end_capture()
        if kind is None:  # else the other processes of the team do not come here
            self._feed.part()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Captured]:
        began, starved_s = time.monotonic(), self._feed.waited_s
        try:
            return next(self._captured) if self._thread is None else self._take()
        finally:
            blocked_s = time.monotonic() - began
            starved_s = min(blocked_s, self._feed.waited_s - starved_s)
            self.starved_s += starved_s
            self.waited_s += blocked_s - starved_s

    def _take(self) -> list[Captured]:
        with self._changed:
            while not self._changed.wait_for(lambda: self._made, IDLE_S):
                if self._feed.is_waiting:
                    self._on_idle(self._feed)
            made = self._made[0]
            if made.captured is None:  # it stays: there is nothing after the end
                raise made.error or StopIteration
            self._made.popleft()
            self._changed.notify_all()
        if made.there is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(made.there)
            for one in made.captured:  # freed by the loop, but allocated on the stream of the thread
                one.hidden.record_stream(stream)
                one.last.record_stream(stream)
        return made.captured

    def _work(self) -> None:
        try:
            with _stream_beside(self._device) as stream:
                while self._has_room():
                    captured = next(self._captured, None)
                    if captured is None:
                        break
                    self._put(Made(captured, None if stream is None else stream.record_event()))
                self._end_capture()
        except BaseException as error:  # raised again by the loop
            self._put(Made(error=error))
        else:
            self._put(Made())

    def _has_room(self) -> bool:
        """Asked before a capture, so that no more than `depth` batches take memory. False once nobody takes them."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._made) < self._depth)
            return not self._closed

    def _end_capture(self) -> None:
        if isinstance(self._captured, Generator):  # a target may hold connections or threads of its own
            self._captured.close()

    def _put(self, made: Made) -> None:
        with self._changed:
            self._made.append(made)
            self._changed.notify_all()


@contextmanager
def _stream_beside(device: torch.device) -> Generator[torch.cuda.Stream | None]:
    """On a GPU a stream of this thread's own, after what the stream that trains has been given so far."""
    if device.type != "cuda":
        yield None
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield stream
