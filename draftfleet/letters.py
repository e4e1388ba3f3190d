"""The dead letters of a run: rows that failed and are not asked again, and batches that cannot be read.

A row's letter is the record that counts for it (draftfleet.outcomes): it stands in a sample shard, or in `dead/` where
the row was parked. Only shards whose counts say that a row failed are read. A batch's letter is a damaged shard, or a
note in `unreadable/` that a worker left which found no prompts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime

from draftfleet.again import Again
from draftfleet.errors import CorruptFile, SettingsError
from draftfleet.names import parent_of, split_of
from draftfleet.outcomes import Counts, best
from draftfleet.records import Sample
from draftfleet.runs import Run

KINDS = {
    "bad_request": "the server refused the row",
    "transient": "no server answered it in all its tries",
    "unusable": "the answers made no sense",
    "crash": "servers ended while they worked on it",
    "worker": "workers ended while it was their only suspect",
    "unknown": "it was written before kinds were",
    "unreadable": "a batch whose prompts or samples cannot be read",
}

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """`sample` is the record of the row; a dead batch has none. `time` is seconds since 1970, 0 where none is known."""

    run: str
    batch: str
    row_key: str = ""
    prompt_id: str = ""
    split: str
    kind: str
    status: int | None = None
    server: str = ""
    worker: str = ""
    attempt: int = 0
    time: float = 0.0
    message: str
    sample: Sample | None = None

    @classmethod
    def of(cls, sample: Sample) -> Letter:
        return cls(
            run=sample.run,
            batch=sample.batch,
            row_key=sample.row_key,
            prompt_id=sample.prompt_id,
            split=sample.split,
            kind=kind_of(sample.error_kind, sample.error_status),
            status=sample.error_status,
            server=sample.server,
            worker=sample.worker,
            attempt=sample.attempt,
            time=sample.started_at,
            message=sample.error or "",
            sample=sample,
        )

    @property
    def name(self) -> str:
        """Of the row, or of the batch."""
        return self.row_key or self.batch

    def to_json(self) -> str:
        """Without the prompt."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sample"}
        return json.dumps(named, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which letters. Each field that is set has to fit; `since` is seconds since 1970."""

    kind: Sequence[str] = ()
    status: int | None = None
    server: str | None = None
    contains: str | None = None
    batch: str | None = None
    since: float | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        for kind in self.kind:
            if kind not in KINDS:
                raise SettingsError(f"--kind {kind}: no such kind; allowed are {', '.join(KINDS)}.")
        if self.split not in (None, "train", "heldout"):
            raise SettingsError(f"--split {self.split}: allowed are train and heldout.")

    @property
    def is_empty(self) -> bool:
        return not any(value not in (None, ()) for value in asdict(self).values())

    def fits_batch(self, batch: str) -> bool:
        """Whether a letter of this batch may fit: asked before anything of it is read."""
        return (self.split is None or split_of(batch) == self.split) and (
            self.batch is None or self.batch in (batch, parent_of(batch)[0]) or parent_of(self.batch)[0] == batch
        )

    def fits(self, letter: Letter) -> bool:
        return (
            (not self.kind or letter.kind in self.kind)
            and (self.status is None or letter.status == self.status)
            and (self.server is None or self.server in letter.server)
            and (self.contains is None or self.contains in letter.message)
            and (self.batch is None or self.batch in (letter.batch, parent_of(letter.batch)[0]))
            and (self.since is None or letter.time >= self.since)
            and (self.split is None or letter.split == self.split)
        )


EVERY = Filter()


def since(text: str) -> float:
    """`90s`, `30m`, `2h`, `7d` ago, or a date as in 2026-07-31 or 2026-07-31T12:00. Raises SettingsError."""
    if _AGO.fullmatch(text):
        return time.time() - span_s(text, "--since")
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise SettingsError(
            f"--since {text}: write 90s, 30m, 2h or 7d for a time ago, or a date as in 2026-07-31T12:00."
        ) from None


def span_s(text: str, flag: str) -> float:
    """`90s`, `30m`, `2h`, `7d` in seconds. Raises SettingsError, naming the flag."""
    if not (said := _AGO.fullmatch(text)):
        raise SettingsError(f"{flag} {text}: write 90s, 30m, 2h or 7d.")
    return float(said[1]) * _SECONDS[said[2]]


def kind_of(kind: str | None, status: int | None) -> str:
    """Of a row that failed. Version 0.1.0 wrote no kind, and a status only where a server had refused the row."""
    return kind or ("bad_request" if status is not None else "unknown")


def find(run: Run, wanted: Filter = EVERY) -> Iterator[Letter]:
    """The letters that fit, batch by batch, as they are found."""
    return (letter for letter in _every(run, wanted) if wanted.fits(letter))


def note_unreadable(run: Run, batch: str, error: Exception, *, worker: str) -> None:
    """A batch has no prompts that can be read: leave word for `draftfleet dead list`. Raises StorageError."""
    batch = parent_of(batch)[0]
    letter = Letter(
        run=run.name,
        batch=batch,
        split=split_of(batch),
        kind="unreadable",
        worker=worker,
        time=time.time(),
        message=str(error),
    )
    run.storage.put_if_absent(f"{run.name}/unreadable/{batch}.json", letter.to_json().encode())


def _every(run: Run, wanted: Filter) -> Iterator[Letter]:
    again = Again(run)
    try:
        again.look()
        split, dead = run.split_sizes(), run.dead()
    except CorruptFile as error:  # without these files nobody can tell which rows are dead
        yield Letter(run=run.name, batch="train-?", split="train", kind="unreadable", message=str(error))
        return
    sizes = run.done_bytes()
    known = indexed(run, sizes)
    families: dict[str, list[str]] = {parent: [] for parent in split}
    for batch in sizes:
        parent = parent_of(batch)[0]
        if parent in families:
            families[parent].append(batch)
        elif wanted.fits_batch(batch):
            yield from _of_shard(run, again, batch, known.get(batch))
    for parent, parts in families.items():
        if wanted.fits_batch(parent):
            yield from _of_family(run, again, parent, parts, dead)
    for batch, sample in dead.items():
        if parent_of(batch)[0] not in families and wanted.fits_batch(batch):
            yield from _not_superseded(again, [sample])
    yield from _noted(run, wanted)


def _of_shard(run: Run, again: Again, batch: str, counts: Counts | None) -> Iterator[Letter]:
    try:
        if (counts or run.counts(batch)).failed:
            failed = [sample for sample in run.read_samples(batch) if sample.outcome == "failed"]
            yield from _not_superseded(again, failed)
    except CorruptFile as error:
        yield _damaged(run, batch, error)


def _of_family(
    run: Run, again: Again, parent: str, parts: Sequence[str], dead: Mapping[str, Sample]
) -> Iterator[Letter]:
    """Of a batch that was split: its rows may have several records."""
    samples = [sample for batch, sample in dead.items() if parent_of(batch)[0] == parent]
    for part in parts:
        try:
            samples += run.read_samples(part)
        except CorruptFile as error:
            yield _damaged(run, part, error)
    yield from _not_superseded(again, [one for one in best(samples).values() if one.outcome == "failed"])


def _not_superseded(again: Again, failed: Sequence[Sample]) -> Iterator[Letter]:
    """Without those that are asked again, and those of which an earlier record is better."""
    for sample in failed:
        if again.succeeds(sample.batch, sample.row_key):
            continue
        if all(
            row.outcome == "failed" and _is_failed(again, row.batch, row.row_key)
            for row in again.before(sample.batch, sample.row_key)
        ):
            yield Letter.of(sample)


def _is_failed(again: Again, batch: str, row_key: str) -> bool:
    """Whether an earlier batch still has nothing better for a row: what was parked may have been answered late."""
    done = [part for part in {batch, parent_of(batch)[0]} if again.run.is_done(part)]
    found = [again.shard(part).get(row_key) for part in done]
    return all(one is None or one.failed for one in found)


def _damaged(run: Run, batch: str, error: Exception) -> Letter:
    return Letter(run=run.name, batch=batch, split=split_of(batch), kind="unreadable", message=str(error))


def _noted(run: Run, wanted: Filter) -> Iterator[Letter]:
    """Notes that still hold: whoever has restored the prompts need not delete the note."""
    for name in sorted(run.storage.list(f"{run.name}/unreadable")):
        batch = name.removesuffix(".json")
        if not wanted.fits_batch(batch):
            continue
        try:
            run.read_prompts(batch)
        except (CorruptFile, FileNotFoundError) as error:
            said = json.loads(run.storage.read(f"{run.name}/unreadable/{name}"))
            yield replace(_damaged(run, batch, error), worker=said["worker"], time=said["time"])


def indexed(run: Run, sizes: Mapping[str, int]) -> dict[str, Counts]:
    """What the shard index knows of shards that are still as long as it says; the others say it themselves."""
    lines = run.index.read()
    return {
        batch: entry.counts
        for batch, entry in lines.items()
        if entry.counts is not None and entry.bytes == sizes.get(batch)
    }
