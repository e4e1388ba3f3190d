"""What a person reads of a measurement, and the bar while it runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from workers.bench.figures import Bench, Figures, Spread
from workers.bench.measuring import Advance


@contextmanager
def progress(total: int, *, enabled: bool) -> Generator[Advance]:
    """On standard error: requests that have ended, of all."""
    if not enabled:
        yield lambda requests: None
        return
    columns = (SpinnerColumn(), TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=total)
        yield lambda requests: bars.advance(task, requests)


def show(bench: Bench) -> None:
    console = Console(highlight=False)
    if bench.levels:
        console.print(_table(bench))
    for line in lines(bench):
        console.print(line, markup=False, soft_wrap=True)


def _table(bench: Bench) -> Table:
    """Behind a figure, how far the repeats lie from their middle. The speed-up stands beside the faster server."""
    table = Table(
        title=f"{bench.model}, {bench.dialect}, median of {bench.repeat}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for head in ("at once", "drafter", "tokens/s", "speed-up", "ms/token", "ms to first", "accepted"):
        table.add_column(head, justify="left" if head == "drafter" else "right", no_wrap=True)
    for level in bench.levels:
        if level.with_drafter is not None:
            speedup = "" if level.speedup is None else f"x{_spread(level.speedup, '.2f')}"
            table.add_row(str(level.concurrency), "with", *_cells(level.with_drafter, speedup))
        if level.without is not None:
            table.add_row(str(level.concurrency), "without", *_cells(level.without, ""))
    return table


def _cells(side: Figures, speedup: str) -> list[str]:
    return [
        _spread(side.tokens_per_s, ",.0f"),
        speedup,
        f"{1e3 * side.inter_token_s.median:.2f}",
        f"{1e3 * side.first_token_s.median:.0f}",
        "" if side.acceptance_length is None else f"{side.acceptance_length:.3f}",
    ]


def _spread(spread: Spread, form: str) -> str:
    half = (spread.most - spread.least) / 2
    return f"{spread.median:{form}} ±{half / spread.median:.0%}"


def lines(bench: Bench) -> Iterator[str]:
    if bench.checkpoint is not None:
        yield f"drafter {bench.drafter}, taken for {bench.checkpoint}: the latest that was exported for this engine"
    accepted = bench.acceptance
    if accepted is not None:
        by_position = " / ".join(f"{share:.3f}" for share in accepted.shares)
        counts = f", {accepted.accepted:,} kept in {accepted.drafts:,} drafts" if accepted.drafts else ""
        yield f"acceptance length {accepted.length:.3f}, by the server's {accepted.source}{counts}" + (
            f"; by position {by_position}" if by_position else ""
        )
    compared = [level for level in bench.levels if level.compared]
    if compared:
        yield "equal answers: " + ", ".join(f"{one.equal} of {one.compared} at {one.concurrency}" for one in compared)
    for difference in bench.differences:
        gap = "" if difference.gap is None else f", {difference.gap:.3f} nats apart"
        why = "a near tie" if difference.is_near_tie else "not a near tie" if gap else "not looked into"
        yield (
            f"prompt {difference.prompt_id} at {difference.concurrency}: answers part at token {difference.position}, "
            f"{difference.with_drafter} with and {difference.without} without: {why}{gap}"
        )
    yield from (f"warning: {one}" for one in bench.warnings)
    if bench.error is not None:
        yield f"it ended early: {bench.error}"
