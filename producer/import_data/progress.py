"""A bar for each part of an import, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def bar(what: str, total: int, *, enabled: bool) -> Generator[Callable[[int], None]]:
    """Gives what is told of each step. Shown if it is wanted and standard error is a terminal."""
    if not (enabled and sys.stderr.isatty()):
        yield lambda _: None
        return
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=total or None)
        yield lambda steps: bars.update(task, advance=steps)
