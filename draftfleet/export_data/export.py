"""`draftfleet export-data`: write the folder beside its place, put it there in one step, push it if asked."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftfleet.accounting import Accountant
from draftfleet.errors import CorruptFile, DataError, SettingsError, StorageUnwritable
from draftfleet.export_data import card
from draftfleet.export_data.formats import Format, format_of
from draftfleet.export_data.formats.files import sync
from draftfleet.export_data.kept import Kept
from draftfleet.export_data.tally import Tally
from draftfleet.export_data.units import Wanted, units_of
from draftfleet.hub import Hub, Place
from draftfleet.logs import event
from draftfleet.names import Split
from draftfleet.redaction import redact
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage

log = logging.getLogger(__name__)

MARK = "export.json"
"""Says that a folder is an export, and of what. A folder without it is never replaced."""

UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""What a full disk answers, or one that is not ours to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What lies in the folder. `complete`: every sample of the run was there. `left_out` counts answers by reason."""

    folder: str
    format: str
    lines: int
    answers: int
    splits: dict[str, int]
    outcomes: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    corrupt: list[str] = field(default_factory=list[str])
    complete: bool = True
    pending: int | None = 0
    bytes: int = 0
    seconds: float = 0.0
    hub: str | None = None


def export(
    settings: Settings,
    folder: str | Path,
    wanted: Wanted | None = None,
    *,
    overwrite: bool = False,
    hub: Place | None = None,
    license: str | None = None,
    progress: bool = False,
) -> Exported:
    """Write the run's samples into a new folder. It may be done at any time, also while the run is at work.

    A shard that cannot be read is named in `corrupt`, and the rest goes on. Raises SettingsError, RunMissing, DataError
    where there is no row to write, HubError or StorageError.
    """
    started = time.monotonic()
    wanted, folder = wanted or Wanted(), Path(folder).expanduser()
    form = format_of(wanted)
    _refuse(wanted, folder, overwrite=overwrite)
    run = Run.open(open_storage(settings.storage), settings.run)
    pushing = None if hub is None else Hub(hub)
    if pushing is not None:
        pushing.check(overwrite=overwrite)
    with _staging(folder, overwrite=overwrite) as staged:
        kept, tally = Kept(run), Tally()
        splits = _write(staged, form, wanted, kept, tally, progress=progress)
        if not splits:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in tally.left_out.items()) or "no samples yet"
            raise DataError(f"run {run.name} has no row to export as {wanted.format} ({reasons}).")
        form.finish(staged, splits)
        state = _state(run)
        files = [_described(staged, path) for path in sorted(staged.rglob("*")) if path.is_file()]
        facts = card.Facts(
            run=run,
            wanted=wanted,
            tally=tally,
            state=state,
            files={split: form.files.format(split=split) for split in splits},
            corrupt=sorted(kept.corrupt),
            license=license,
            command=redact(shlex.join(["draftfleet", *sys.argv[1:]])),
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
        card.write(staged, facts)
        (staged / MARK).write_text(card.as_json(facts, files), encoding="utf-8")
    seconds = round(time.monotonic() - started, 3)
    done = Exported(
        folder=str(folder),
        format=wanted.format,
        lines=tally.num_lines,
        answers=tally.num_answers,
        splits=dict(tally.lines),
        outcomes={name: sum(one[name] for one in tally.outcomes.values()) for name in wanted.outcomes},
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        left_out=dict(tally.left_out),
        corrupt=sorted(kept.corrupt),
        complete=state.complete,
        pending=state.pending,
        bytes=sum(one["bytes"] for one in files),
        seconds=seconds,
        hub=None if pushing is None else pushing.push(folder, f"{run.name}: {tally.num_lines:,} lines"),
    )
    log.info(event("exported", run=run.name, format=wanted.format, lines=done.lines, seconds=seconds))
    return done


def _write(folder: Path, form: Format, wanted: Wanted, kept: Kept, tally: Tally, *, progress: bool) -> list[Split]:
    """The splits that have lines."""
    needs_ids = wanted.turns in form.needs_ids
    written: list[Split] = []
    total = sum(kept.num_batches(split) for split in wanted.splits)
    with _bar(total, tally, enabled=progress) as step:
        for split in wanted.splits:
            writer = None
            with closing(
                kept.batches(split)
            ) as batches:  # also after an error: its readers end before the process does
                for samples in batches:
                    left = None if wanted.limit is None else wanted.limit - tally.lines[split]
                    if left is not None and left <= 0:
                        break
                    units = [
                        unit
                        for sample in samples
                        for unit in units_of(sample, wanted, needs_ids=needs_ids, left_out=tally.left_out)
                    ][:left]
                    if units and writer is None:
                        writer = form.open(folder, split, wanted)
                        written.append(split)
                    if units and writer is not None:
                        writer.write(units)
                    for unit in units:
                        tally.add(unit)
                    step()
            if writer is not None:
                writer.close()
    return written


def _state(run: Run) -> card.State:
    """How far the run is, as `draftfleet status` counts it."""
    try:
        account = Accountant(run).account()
    except CorruptFile as error:
        log.warning(event("run not counted", run=run.name, error=error))
        return card.State(complete=False, expected=None, pending=None)
    return card.State(complete=account.is_complete, expected=account.expected, pending=account.pending)


def _described(folder: Path, path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": str(path.relative_to(folder)), "bytes": path.stat().st_size, "sha256": digest}


def _refuse(wanted: Wanted, folder: Path, *, overwrite: bool) -> None:
    if wanted.limit is not None and wanted.limit < 1:
        raise SettingsError(f"--limit {wanted.limit}: it is at least 1; leave it out for all rows.")
    if wanted.file_mb < 1:
        raise SettingsError(f"--file-mb {wanted.file_mb}: it is at least 1.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MARK).is_file():
        raise SettingsError(f"{folder} is there and no export of draftfleet ({MARK} is not in it): use another folder.")
    if not overwrite:
        raise SettingsError(f"{folder} holds an export already: use another folder, or --overwrite to replace it.")


@contextmanager
def _staging(folder: Path, *, overwrite: bool) -> Generator[Path]:
    """A folder beside the one that is wanted, which takes its place if all went well, and goes if not."""
    staged = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        staged.mkdir(parents=True)
        yield staged
        sync(staged)
        _refuse(Wanted(), folder, overwrite=overwrite)  # somebody else may have been quicker
        if folder.exists():
            old = staged.with_suffix(".old")
            folder.rename(old)
            try:
                staged.rename(folder)
            except OSError:
                old.rename(folder)
                raise
            shutil.rmtree(old)
        else:
            staged.rename(folder)
        sync(folder.parent)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise StorageUnwritable(
            f"could not write {folder}: {os.strerror(error.errno)}. Make room or make it writable, or name another "
            "folder, and export again: nothing of this one is left."
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def _bar(total: int, tally: Tally, *, enabled: bool) -> Generator[Callable[[], None]]:
    """A bar on standard error, if it is wanted and that is a terminal."""
    if not (enabled and sys.stderr.isatty()):
        yield lambda: None
        return
    columns: list[Any] = [
        TextColumn("exporting"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.completed:,} batches  {task.fields[lines]:,} lines"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    ]  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("exporting", total=total, lines=0)
        yield lambda: bars.update(bar, advance=1, lines=tally.num_lines)
