"""`draftfleet report RUN`: one HTML file that says what a run did, for people who were not there.

state      what `draftfleet status` counts           history    what the workers noted (draftfleet.history)
rows       the narrow columns of every shard         browser    some rows in full
-> work, answers, timeline, training, origin -> page: one file, without network, with its own style and script
"""

from __future__ import annotations

import difflib
import shlex
import sys
import time
import webbrowser
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftfleet import history, status
from draftfleet.accounting import Accountant
from draftfleet.errors import RunMissing, StorageUnwritable
from draftfleet.report import browser, page
from draftfleet.report.answers import answers_of
from draftfleet.report.origin import origin_of
from draftfleet.report.rows import Rows, read
from draftfleet.report.timeline import timeline_of
from draftfleet.report.training import drafters_of
from draftfleet.report.work import work_of
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import Storage, open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`file` unset: RUN.html here. `price` is of an hour of one GPU, in whatever currency."""

    file: str | None = None
    gpus_per_server: float | None = None
    price: float | None = None
    samples: int = 100
    seed: int = 0
    opens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """`corrupt` shards could not be read and are not in the figures."""

    file: str
    bytes: int
    rows: int
    samples: int
    seconds: float
    corrupt: list[str] = field(default_factory=list[str])


def report(settings: Settings, options: Options, *, progress: bool) -> Written:
    """Read the run as it is now and write the file. Raises RunMissing, StorageError, or TargetError for target.path."""
    started = time.monotonic()
    run = _open(open_storage(settings.storage), settings.run)
    accountant = Accountant(run)
    as_of = time.time()
    state = status.collect(settings, accountant)
    batches = list(accountant.done)
    with _bar("reading shards", len(batches), enabled=progress) as step:
        rows = read(run, batches, step=step)
    picked = browser.chosen(rows, options.samples, options.seed)
    with _bar("reading samples", len({row.batch for row, _ in picked}), enabled=progress) as step:
        pieces = browser.tokenizer_of(run, settings) if picked else None
        samples = browser.records(run, picked, pieces, rows, step=step)
    text = page.render(
        **_parts(settings, run, state, rows, as_of), options=options, samples=samples, has_tokenizer=pieces is not None
    )
    file = Path(options.file or f"{run.name}.html")
    _write(file, text)
    if options.opens:
        webbrowser.open(file.resolve().as_uri())
    return Written(
        file=str(file),
        bytes=len(text),
        rows=len(rows.rows),
        samples=len(samples),
        seconds=round(time.monotonic() - started, 3),
        corrupt=sorted({*rows.corrupt, *state["batches"]["corrupt"]}),
    )


def _parts(settings: Settings, run: Run, state: dict[str, Any], rows: Rows, as_of: float) -> dict[str, Any]:
    known = history.read(run)
    work = work_of(rows, known)
    limit = run.info.content.get("sampling.max_tokens")
    return {
        "run": run.info,
        "state": state,
        "warnings": _warnings(state),
        "as_of": as_of,
        "is_complete": state["expected"] is not None and not state["pending"],
        "rows": rows,
        "work": work,
        "answers": answers_of(rows.rows, limit if isinstance(limit, int) else None),
        "timeline": timeline_of(known, work.times, as_of),
        "drafters": drafters_of(settings, run, state["drafters"]),
        "origin": origin_of(run, rows.records, shlex.join(["draftfleet", *sys.argv[1:]])),
    }


def _warnings(state: dict[str, Any]) -> list[str]:
    """Those of `status` that are about the run, and not about the present."""
    return [one for one in status.warnings(state) if one != state["queue"]["error"]]


def _open(storage: Storage, name: str) -> Run:
    """Raises RunMissing, with the names that are like it."""
    try:
        return Run.open(storage, name)
    except RunMissing as error:
        there = [one for one in storage.folders() if storage.exists(f"{one}/run.json")]
        near = difflib.get_close_matches(name, there, n=3) or sorted(there)[:10]
        said = f"\nRuns that are there: {', '.join(near)}" if near and name not in there else ""
        raise RunMissing(f"{error}{said}") from None


def _write(file: Path, text: bytes) -> None:
    """In one step: who has the earlier report open never sees half of this one. Raises StorageUnwritable."""
    staged = file.with_name(f".{file.name}.{time.time_ns()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        staged.write_bytes(text)
        staged.replace(file)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise StorageUnwritable(f"could not write {file}: {error}. Name another file with --out.") from None


@contextmanager
def _bar(title: str, total: int, *, enabled: bool) -> Generator[Callable[[], None]]:
    """A bar on standard error, if it is wanted."""
    if not enabled:
        yield lambda: None
        return
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(title, total=total)
        yield lambda: bars.advance(bar)


__all__ = ["Options", "Written", "report"]
