"""How far a run is: a bar on a terminal, a line every half minute elsewhere. Both on standard error."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

LINE_S = 30.0
OUTCOMES = ("ok", "truncated", "failed")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one look. `done` are rows with an outcome, those that stand in no shard yet included."""

    done: int
    expected: int
    outcomes: Counter[str]
    tokens_per_s: float
    left_s: float | None
    servers: Counter[str]

    @property
    def rate(self) -> str:
        return f"{self.tokens_per_s:,.0f} tokens/s"

    @property
    def left(self) -> str:
        return f"{duration(self.left_s)} left" if self.left_s is not None else ""

    @property
    def counts(self) -> str:
        """`1,190 ok, 12 truncated, 2 failed`"""
        return ", ".join(f"{self.outcomes[name]:,} {name}" for name in OUTCOMES if self.outcomes[name] or name == "ok")

    @property
    def fleet(self) -> str:
        """`servers 7 ready, 1 away`"""
        return "servers " + (
            ", ".join(f"{count} {state}" for state, count in self.servers.most_common()) or "not asked yet"
        )


class Looks:
    """Makes figures of the state."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def at(self, state: dict[str, Any]) -> Figures:
        """`state` is what `draftfleet status --json` says."""
        parts = [part for worker in state["workers"] for part in worker["runs"] if part["run_id"] == self._run_id]
        outcomes = Counter({name: state[name] + sum(part[name] for part in parts) for name in OUTCOMES})
        rows = sum(state[name] for name in (*OUTCOMES, "pending"))
        expected = rows if state["expected"] is None else state["expected"]
        # A report may still name rows whose shard has just been put: never more than there are.
        done = min(outcomes.total(), expected)
        servers = [server for worker in state["workers"] for server in worker["servers"]]
        return Figures(
            done=done,
            expected=expected,
            outcomes=outcomes,
            tokens_per_s=sum(server["tokens_per_s"] for server in servers),
            left_s=state["eta"]["seconds"],
            servers=Counter(server["state"] for server in servers),
        )


class Display(Protocol):
    def show(self, figures: Figures) -> None: ...

    def tell(self, line: str) -> None:
        """What a person should know now."""
        ...


class Lines:
    """One line each LINE_S."""

    def __init__(self) -> None:
        self._next = 0.0

    def show(self, figures: Figures) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_S
            share = f"{figures.done / max(figures.expected, 1):.0%}"
            words = [figures.counts, figures.rate, figures.left, figures.fleet]
            self.tell(f"{figures.done:,}/{figures.expected:,} rows ({share}), {', '.join(filter(None, words))}")

    def tell(self, line: str) -> None:
        print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


class Bar:
    """A bar, with a line below it for what does not fit beside it."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._rows = bars.add_task("", total=None)

    def show(self, figures: Figures) -> None:
        words = "  ".join(filter(None, (f"{figures.done:,}/{figures.expected:,}", figures.rate, figures.left)))
        below = f"{figures.counts}; {figures.fleet}"
        self._bars.update(self._rows, completed=figures.done, total=figures.expected, words=words, below=below)

    def tell(self, line: str) -> None:
        self._bars.console.print(time.strftime("%H:%M:%S"), line, markup=False, highlight=False)


@contextmanager
def shown(*, bar: bool) -> Generator[Display]:
    if not bar:
        yield Lines()
        return
    columns = BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.fields[words]}\n{task.fields[below]}")
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield Bar(bars)


def duration(seconds: float) -> str:
    """`42 s`, `12 min`, `3 h 20 min`"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{minutes} min" if minutes < 90 else f"{hours} h {rest} min"
