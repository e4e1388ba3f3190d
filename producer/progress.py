"""How far, how many lines a second, how many prompts, how long still: a bar on a terminal, a log line elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftfleet.logs import event
from producer.reading import Reading
from producer.sources import Source

log = logging.getLogger(__name__)

TELL_S = 30.0
"""Seconds between two log lines where there is no bar."""


@contextmanager
def watched(source: Source, reading: Reading, *, enabled: bool, doing: str = "producing") -> Generator[None]:
    """Show the bar while the block runs, if it is wanted and standard error is a terminal; log lines if not."""
    if enabled and sys.stderr.isatty():
        with _Bar(source, reading, doing):
            yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_tell, args=(source, reading, ended), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell(source: Source, reading: Reading, ended: threading.Event) -> None:
    started = time.monotonic()
    while not ended.wait(TELL_S):
        seconds = time.monotonic() - started
        fields: dict[str, object] = {"lines": reading.lines, "lines_per_s": reading.lines / seconds}
        if source.size and source.position:
            share = min(source.position / source.size, 1)
            fields |= {"percent": 100 * share, "left_s": seconds / share - seconds}
        log.info(event("data set read on", source=source.name, **fields))


class _Bar(Progress):
    """Looks at the source and the reading each time it is drawn: the reading knows nothing of it."""

    def __init__(self, source: Source, reading: Reading, doing: str) -> None:
        # Before the base class is set up: it draws once while it is.
        self._source = source
        self._reading = reading
        self._started = time.monotonic()
        super().__init__(
            TextColumn(doing),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[lines]:,} lines  {task.fields[rate]:,.0f}/s  {task.fields[prompts]:,} prompts"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.add_task(doing, total=source.size, lines=0, rate=0.0, prompts=0)

    def get_renderables(self) -> Iterable[RenderableType]:
        reading = self._reading
        rate = reading.lines / max(time.monotonic() - self._started, 1e-3)
        prompts = reading.lines - reading.malformed - reading.rejected.total()
        for bar in self.task_ids:
            self.update(bar, completed=self._source.position, lines=reading.lines, rate=rate, prompts=prompts)
        yield from super().get_renderables()
