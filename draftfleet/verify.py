"""`draftfleet verify RUN`: every shard is read again and held against its prompts and its line in the index.

It reads while a collection runs: what is put after it began is left to the next time. Lines that are missing or wrong
are written; a shard at fault is moved aside only with `--repair`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftfleet import shards
from draftfleet.accounting import Accountant
from draftfleet.columns import SAMPLE_SCHEMA
from draftfleet.errors import CorruptFile, NewerFile, QueueError
from draftfleet.index import Entry
from draftfleet.names import parent_of
from draftfleet.outcomes import Counts
from draftfleet.records import Prompt, Sample
from draftfleet.repair import publish_again, set_aside
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage

READERS = 8
REQUIRED = {one.name for one in fields(Sample) if one.default is MISSING and one.default_factory is MISSING}
"""Columns that every version has."""

NEWER = "Verify the run with that draftfleet; this one leaves the shard as it is."
PROMPT_FAULTS = (ValueError, TypeError, KeyError, EOFError, OSError, zlib.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`sha256` is that of the sample shard as it was read: it can be done again. Empty where only a copy helps."""

    batch: str
    what: str
    do: str
    sha256: str = ""


@dataclass(slots=True, kw_only=True)
class Found:
    """What was read, and what is wrong with it. `lines_written` were missing in the index, or wrong."""

    run: str
    sample_shards: int = 0
    prompt_shards: int = 0
    rows: int = 0
    bytes: int = 0
    lines_written: int = 0
    faults: list[Fault] = field(default_factory=list[Fault])
    moved: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def take(self, other: Found) -> None:
        for name in ("sample_shards", "prompt_shards", "rows", "bytes", "lines_written", "faults"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def show(settings: Settings, *, repair: bool, as_json: bool, progress: bool) -> int:
    """Verify the run and say what was found. Exit code 0 if all is sound, 1 if anything was not, repaired or not."""
    run = Run.open(open_storage(settings.storage), settings.run)
    found = verify(run, progress=progress)
    if repair:
        found.moved = set_aside(run, [fault.batch for fault in found.faults if _is_as_it_was(run, fault)])
        if found.moved:
            _publish_again(settings, run, found.moved)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        _say(found, repair=repair)
    return 1 if found.faults else 0


def verify(run: Run, *, progress: bool = False) -> Found:
    """Read all of it. Writes the lines of the index that are missing or wrong; changes nothing else."""
    started = time.monotonic()
    done = run.done_bytes()
    families: dict[str, list[str]] = {batch: [] for batch in run.batches()}
    for name in done:
        families.setdefault(parent_of(name)[0], []).append(name)
    look = _Look(run)
    found = Found(run=run.name)
    with _bar(len(families), progress) as step, ThreadPoolExecutor(READERS) as pool:
        try:
            for one in pool.map(look.family, families, families.values()):
                found.take(one)
                step(found)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    run.index.flush()
    found.faults += _sums(run)
    found.seconds = round(time.monotonic() - started, 3)
    return found


class _Look:
    """Looks at one batch at a time, from several threads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._samples = run.index.read("samples")
        self._prompts = run.index.read("prompts")

    def family(self, parent: str, names: Sequence[str]) -> Found:
        """A prompt shard and the sample shards of its batch, or of the single rows that the batch was split into."""
        found = Found(run=self._run.name)
        prompts = self._asked(parent, found)
        for name in names:
            row = parent_of(name)[1]
            asked = None if prompts is None else prompts if row is None else prompts[row : row + 1]
            self._answered(name, asked, found)
        return found

    def _asked(self, batch: str, found: Found) -> list[Prompt] | None:
        copy = "Restore it from a copy: `produce` does not write a batch again whose shard is there."
        try:
            raw = self._run.read_shard("prompts", batch)
            prompts = shards.prompts_in(raw)
        except FileNotFoundError:
            copy = "Restore it from a copy, or move the samples away."
            found.faults.append(Fault(batch=batch, what="there are samples and no prompt shard", do=copy))
            return None
        except NewerFile as error:
            found.faults.append(Fault(batch=batch, what=f"its prompt shard: {error}", do=NEWER))
            return None
        except PROMPT_FAULTS as error:
            found.faults.append(Fault(batch=batch, what=f"its prompt shard cannot be read: {error}", do=copy))
            return None
        found.prompt_shards += 1
        found.bytes += len(raw)
        entry, known = Entry.of("prompts", batch, raw, len(prompts)), self._prompts.get(batch)
        if known is not None and known.sha256 != entry.sha256:
            what = "its prompt shard is not the one that was produced: another checksum than in the index"
            found.faults.append(Fault(batch=batch, what=what, do=copy))
            return None
        self._mend(entry, known, found)
        return prompts

    def _answered(self, name: str, asked: list[Prompt] | None, found: Found) -> None:
        try:
            raw = self._run.read_shard("samples", name)
        except FileNotFoundError:  # moved aside since it was listed
            return
        found.sample_shards += 1
        found.bytes += len(raw)
        digest, known = hashlib.sha256(raw).hexdigest(), self._samples.get(name)
        if known is not None and known.sha256 != digest:
            known = self._run.index.read("samples").get(name)  # done anew since then, perhaps
        try:
            if known is not None and known.sha256 != digest:
                raise ValueError("its checksum is not the one in the index: it is not what was committed")
            table = shards.table_in(raw)
            counts = self._check(name, table, asked)
            if counts != shards.counts_in(raw):
                raise ValueError("its footer counts other rows than it has")
        except NewerFile as error:
            found.faults.append(Fault(batch=name, what=f"its sample shard: {error}", do=NEWER))
            return
        except shards.READ_FAULTS as error:
            do = f"`draftfleet verify {self._run.name} --repair` moves it aside and has its batch done again."
            found.faults.append(Fault(batch=name, what=f"its sample shard is at fault: {error}", do=do, sha256=digest))
            return
        found.rows += counts.rows
        self._mend(Entry.of("samples", name, raw, table.num_rows, counts), known, found)

    def _check(self, name: str, table: pa.Table, asked: list[Prompt] | None) -> Counts:
        """What the table holds. Raises ValueError if it is not the answer to what was asked."""
        for column in SAMPLE_SCHEMA:
            if column.name not in table.column_names:
                if column.name in REQUIRED:
                    raise ValueError(f"it has no column {column.name}")
            elif table.schema.field(column.name).type != column.type:
                raise ValueError(f"its column {column.name} is {table.schema.field(column.name).type}")
        for column, value in (("run_id", self._run.run_id), ("batch", name)):
            if strange := set(table[column].to_pylist()) - {value}:
                raise ValueError(f"{column} is {strange.pop()} in some rows, and should be {value}")
        keys = table["row_key"].to_pylist()
        if asked is not None:
            owed = {prompt.row_key for prompt in asked}
            if set(keys) != owed or len(keys) != len(owed):
                missing, strange = len(owed - set(keys)), len(set(keys) - owed)
                raise ValueError(
                    f"it has {len(keys)} rows for {len(owed)} prompts: {missing} are missing, {strange} were not asked"
                )
        return Counts.total([counts for _, counts in shards.counted(table)])

    def _mend(self, entry: Entry, known: Entry | None, found: Found) -> None:
        if known is None or not known.same_shard(entry):
            self._run.index.add(entry)
            found.lines_written += 1


def _sums(run: Run) -> list[Fault]:
    """The files that no shard stands for, and whether every row is somewhere."""
    try:
        accounting = Accountant(run).account()
    except NewerFile:  # reported where it was read; its rows cannot be added up
        return []
    except CorruptFile as error:
        return [Fault(batch="", what=str(error), do="Restore the file from a copy.")]
    if accounting.holds:
        return []
    what = f"{accounting.rows} rows are known, and the producer made {accounting.expected}"
    return [Fault(batch="", what=what, do="Please report this with the listing of the run's folder.")]


def _is_as_it_was(run: Run, fault: Fault) -> bool:
    """Whether the shard at fault still lies there: another repair may have been quicker, and a worker after it."""
    try:
        return bool(fault.sha256) and hashlib.sha256(run.read_shard("samples", fault.batch)).hexdigest() == fault.sha256
    except FileNotFoundError:
        return False


def _publish_again(settings: Settings, run: Run, moved: Sequence[str]) -> None:
    try:
        publish_again(settings, run, moved)
    except QueueError as error:
        print(f"{error} The workers publish what was moved aside by themselves, later.", file=sys.stderr)


def _say(found: Found, *, repair: bool) -> None:
    print(
        f"run {found.run}: {found.sample_shards:,} sample shards with {found.rows:,} rows and "
        f"{found.prompt_shards:,} prompt shards, {found.bytes / 1e9:,.3f} GB read in {found.seconds:,.1f} s"
    )
    if found.lines_written:
        print(f"{found.lines_written:,} lines of the index were missing or wrong: written")
    for fault in found.faults:
        moved = fault.batch in found.moved
        print(f"{fault.batch or 'run'}: {fault.what}. {'Moved aside, to be done again.' if moved else fault.do}")
    if not found.faults:
        print("all is sound")
    elif repair:
        print(f"{len(found.moved)} shards moved aside, {len(found.faults) - len(found.moved)} faults left")


@contextmanager
def _bar(total: int, enabled: bool) -> Generator[Callable[[Found], None]]:
    """A bar on standard error, if it is wanted and that is a terminal."""
    if not (enabled and sys.stderr.isatty()):
        yield lambda _: None
        return
    columns: list[Any] = [
        TextColumn("verifying"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.completed:,} batches  {task.fields[rate]:,.0f} MB/s  {task.fields[faults]} faults"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    ]  # fmt: skip
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("verifying", total=total, rate=0.0, faults=0)

        def step(found: Found) -> None:
            rate = found.bytes / 1e6 / max(time.monotonic() - started, 1e-3)
            bars.update(bar, advance=1, rate=rate, faults=len(found.faults))

        yield step
