"""`draftfleet dead`: list the dead letters of a run, show one, have them asked again, write them out."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from draftfleet import again, control
from draftfleet.conversations import Sources
from draftfleet.errors import DraftfleetError, QueueError, RunConflict, SettingsError
from draftfleet.letters import KINDS, Filter, Letter, find
from draftfleet.names import parts_of
from draftfleet.queue import connect, make_app, publish
from draftfleet.reconcile import model_of
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage

ENDS_ITS_HOLDER = {"crash", "worker"}
"""Rows of these kinds are asked one at a time from the start: their neighbours shall not pay for them again."""

BATCH_SIZE = 64
"""Where a run pins none."""

ROWS_SHOWN = 50
MESSAGE_SHOWN = 160


def show_list(settings: Settings, wanted: Filter, *, limit: int | None, as_json: bool) -> int:
    """Print at most `limit` letters (unset: ROWS_SHOWN in the table, all as JSON); then how many of each kind."""
    run = _open(settings)
    counts, examples = Counter[str](), dict[str, Letter]()

    def counted() -> Iterator[Letter]:
        for letter in find(run, wanted):
            counts[letter.kind] += 1
            examples.setdefault(letter.kind, letter)
            yield letter

    letters = counted()
    if as_json:
        for letter in islice(letters, limit):
            print(letter.to_json(), flush=True)
    elif rows := list(islice(letters, ROWS_SHOWN if limit is None else limit)):
        Console(markup=False).print(_table(rows))
    shown = counts.total()
    for _ in letters:  # the summary is of all
        pass
    print(_summary(run, counts, examples, shown), file=sys.stderr if as_json else sys.stdout)
    return 0


def show_one(settings: Settings, prefix: str) -> int:
    """Print the one letter whose row key, or batch, begins so, and its prompt. Raises DraftfleetError."""
    run = _open(settings)
    found = [letter for letter in find(run) if letter.name.startswith(prefix)]
    if not found:
        raise DraftfleetError(
            f"run {run.name} has no dead letter {prefix}: `draftfleet dead list` names them by row key. A row that is "
            "asked again has none."
        )
    if len(found) > 1:
        names = ", ".join(sorted(letter.name for letter in found)[:5])
        raise DraftfleetError(f"{len(found)} dead letters begin with {prefix} ({names}): give more of the row key.")
    [letter] = found
    seen = again.Again(run)
    seen.look()
    shown = json.loads(letter.to_json()) | {"time": _when(letter)}
    if earlier := [row.batch for row in seen.before(letter.batch, letter.row_key)]:
        shown["asked before in"] = ", ".join(earlier)
    width = max(map(len, shown))
    for name, value in shown.items():
        if value not in (None, ""):
            print(f"{name:{width}}  {value}")
    if letter.sample is not None:
        print("\nprompt")
        print(
            json.dumps({"messages": letter.sample.messages, "tools": letter.sample.tools}, indent=2, ensure_ascii=False)
        )
    return 0


def revive(settings: Settings, wanted: Filter, *, every: bool, dry_run: bool) -> dict[str, Any]:
    """Ask the rows again: new batches of them, into the queue. Letters of whole batches stay; nothing is asked twice.

    Raises SettingsError without a filter or `every`, RunConflict on a cancelled run, QueueError, StorageError.
    """
    if wanted.is_empty and not every:
        raise SettingsError("say which rows to revive, as in --kind transient, or all of them: --all.")
    run = _open(settings)
    _refuse_cancelled(run)
    rows = Counter[str]()
    unreadable = Counter[str]()

    def samples() -> Iterator[Sample]:
        for letter in find(run, wanted):
            if letter.sample is None:
                unreadable[letter.kind] += 1
                continue
            rows[letter.kind] += 1
            yield letter.sample

    if dry_run:
        return {
            "dry_run": True,
            "rows": sum(1 for _ in samples()),
            "kinds": dict(rows),
            "unreadable_batches": unreadable.total(),
        }
    app, client = make_app(settings), connect(settings)  # before anything is made: it may be away
    mended = again.mend(run)
    size = int(run.info.content.get("producer.batch_size") or BATCH_SIZE)
    made = again.create(run, samples(), batch_size=size, alone=lambda sample: sample.error_kind in ENDS_ITS_HOLDER)
    split = run.split_sizes()
    work = [part for batch in [*mended, *made] for part in parts_of(batch, split.get(batch))]
    try:
        publish(app, client, run, model_of(run), work)
    except QueueError as error:
        raise QueueError(f"{error} The batches are made: workers publish them by themselves later.") from error
    return {
        "rows": sum(made.values()),
        "kinds": dict(rows),
        "batches": len(made),
        "mended_batches": len(mended),
        "unreadable_batches": unreadable.total(),
    }


def export(settings: Settings, wanted: Filter, file: str) -> dict[str, Any]:
    """Write a JSON line per row that a producer reads: conversation, tools, split; and its error. `-`: stdout."""
    run = _open(settings)
    rows, sources = 0, Sources(run)
    with _to(file) as out:
        for letter in find(run, wanted):
            if letter.sample is None:
                continue
            prompt, rows = sources.prompt(letter.sample), rows + 1
            line = {"messages": prompt.messages, "tools": prompt.tools, "split": prompt.split}
            line = {key: value for key, value in line.items() if value is not None}
            out.write(json.dumps(line | {"error": json.loads(letter.to_json())}, ensure_ascii=False) + "\n")
    return {"rows": rows, "file": file}


def _open(settings: Settings) -> Run:
    return Run.open(open_storage(settings.storage), settings.run)


def _refuse_cancelled(run: Run) -> None:
    if control.read(run).state == "cancelled":
        raise RunConflict(
            f"run {run.name} is cancelled: nothing of it is asked again. `draftfleet resume` takes it up."
        )


def _table(letters: list[Letter]) -> Table:
    table = Table(title="dead letters", title_justify="left")
    for name in ("row", "batch", "kind", "status", "server", "attempt", "time", "message"):
        table.add_column(name, justify="right" if name in ("status", "attempt") else "left", overflow="fold")
    for letter in letters:
        table.add_row(
            letter.row_key[:12],
            letter.batch,
            letter.kind,
            "" if letter.status is None else str(letter.status),
            letter.server,
            str(letter.attempt or ""),
            _when(letter),
            _short(letter.message),
        )
    return table


def _summary(run: Run, counts: Counter[str], examples: dict[str, Letter], shown: int) -> str:
    total = counts.total()
    if not total:
        return f"run {run.name} has no such dead letters"
    lines = [f"run {run.name} has {total:,} such dead letters, {min(shown, total):,} shown"]
    for kind, count in counts.most_common():
        example = examples[kind]
        lines.append(
            f"  {count:,} {kind}: {KINDS[kind]}; as {example.name[:12]} in {example.batch}: {_short(example.message)}"
        )
    return "\n".join(lines)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_SHOWN else line[: MESSAGE_SHOWN - 1] + "…"


def _when(letter: Letter) -> str:
    return datetime.fromtimestamp(letter.time).strftime("%Y-%m-%d %H:%M:%S") if letter.time else ""


@contextlib.contextmanager
def _to(file: str) -> Generator[TextIO]:
    """Under another name until it is whole."""
    if file == "-":
        yield sys.stdout
        return
    staged = Path(f"{file}.{time.time_ns()}.part")
    try:
        with staged.open("w", encoding="utf-8") as out:
            yield out
        staged.replace(file)
    except OSError as error:
        raise DraftfleetError(
            f"could not write {file}: {error.strerror}. Name a file in a folder that you may write."
        ) from None
    finally:
        staged.unlink(missing_ok=True)
