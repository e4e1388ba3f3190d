"""Bars: on a terminal they move, elsewhere a line is printed now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from estimate import Estimate
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

LINE_S = 15.0
"""Seconds between two printed lines of one bar where there is no terminal."""
WIDE = 100
"""Columns of a terminal from which on there is room for the time elapsed and for whole words."""


@dataclass
class _Stage:
    task: TaskID
    printed_at: float
    estimate: Estimate = field(default_factory=Estimate)


class Bars:
    """Stages that advance side by side, each with its rate, its time left and a few words."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self.is_wide = console.width >= WIDE or not console.is_terminal
        self._progress = Progress(
            *_columns(is_wide=self.is_wide), console=console, disable=not console.is_terminal, expand=True
        )
        self._stages: dict[str, _Stage] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, stage: str, completed: int, total: int | None, words: str, *, waiting: bool = False) -> None:
        """Time in which the stage is `waiting` says nothing about how long the rest of it takes."""
        now = self._clock()
        if stage not in self._stages:
            task = self._progress.add_task(stage, total=total, visible=False, words="", count="", rate="", left="")
            self._stages[stage] = _Stage(task, now)
        shown = self._stages[stage]
        shown.estimate.note(completed, now, waiting=waiting)
        finished = total is not None and completed >= total
        rate = None if finished else shown.estimate.rate
        left_s = None if finished else shown.estimate.left_s(total)
        count = f"{completed:,}/{'?' if total is None else f'{total:,}'}"
        self._progress.update(
            shown.task,
            visible=True,
            completed=completed,
            total=total,
            words=words,
            count=count,
            rate="" if rate is None else f"{rate:.1f}/s",
            left="" if left_s is None else f"{_clock_time(left_s)} left",
        )
        if not self._console.is_terminal:
            self._print(stage, count, words, left_s, now, finished=finished)

    def _print(self, stage: str, count: str, words: str, left_s: float | None, now: float, *, finished: bool) -> None:
        """A finished stage is printed once more, and never again."""
        shown = self._stages[stage]
        if (not finished and now - shown.printed_at < LINE_S) or shown.printed_at == float("inf"):
            return
        shown.printed_at = float("inf") if finished else now
        left = "" if left_s is None else f", {_clock_time(left_s)} left"
        self._console.print(f"  {stage:<10} {count}{f', {words}' if words else ''}{left}", highlight=False)


def _columns(*, is_wide: bool) -> list[ProgressColumn]:
    """Numbers keep their width, there or not; the words take the rest of the line, and they alone are cut."""

    def number(name: str, width: int) -> TextColumn:
        column = Column(no_wrap=True, min_width=width)
        return TextColumn(f"{{task.fields[{name}]}}", justify="right", table_column=column)

    elapsed = [TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7))] if is_wide else []
    return [
        TextColumn("  {task.description:<8}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=20 if is_wide else 8),
        number("count", 11),
        number("rate", 6),
        *elapsed,
        number("left", 10),
        TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    ]


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
