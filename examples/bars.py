"""Bars: on a terminal they move, elsewhere a line is printed now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LINE_S = 15.0
"""Seconds between two printed lines of one bar where there is no terminal."""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None or task.finished else f"{task.speed:.1f}/s")


class Bars:
    """Stages that advance side by side, each with its rate, its time left and a few words."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("  {task.description:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._stages: dict[str, TaskID] = {}
        self._printed_at: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, stage: str, completed: int, total: int | None, words: str) -> None:
        if stage not in self._stages:
            self._stages[stage] = self._progress.add_task(stage, total=total, words=words)
            self._printed_at[stage] = time.monotonic()
        self._progress.update(self._stages[stage], completed=completed, total=total, words=words)
        if not self._console.is_terminal:
            self._print(stage, finished=total is not None and completed >= total)

    def _print(self, stage: str, *, finished: bool) -> None:
        """A finished stage is printed once more, and never again."""
        due = finished or time.monotonic() - self._printed_at[stage] >= LINE_S
        if not due or self._printed_at[stage] == float("inf"):
            return
        self._printed_at[stage] = float("inf") if finished else time.monotonic()
        task = next(task for task in self._progress.tasks if task.id == self._stages[stage])
        total = "?" if task.total is None else f"{task.total:,.0f}"
        left = "" if task.time_remaining is None or finished else f", {task.time_remaining:.0f} s left"
        words = f", {task.fields['words']}" if task.fields["words"] else ""
        self._console.print(f"  {stage:<10} {task.completed:,.0f}/{total}{words}{left}", highlight=False)
