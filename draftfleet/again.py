"""Rows that are asked again: in batches of their own, whose rows supersede what earlier batches said of them.

    RUN/prompts/train-again-000000.jsonl.gz    a prompt shard like any other: workers know no difference
        again/train-again-000000.json          for each row of it, which record of which batch it supersedes

Shards never change, so a row that is asked again has several records. It counts once: as pending while any batch that
asks it is outstanding, then as the best of them (draftfleet.outcomes). A record is superseded once: who asks for it
again finds its successor, and a successor may be superseded in its turn.

The file in `again/` comes first and its number is the next one, put only if absent: of two processes that make a batch
at the same moment one is told, looks again, and leaves out what the other asks. Without its prompt shard it means
nothing; `mend` finishes it.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from draftfleet.conversations import Sources, merged
from draftfleet.errors import CorruptFile
from draftfleet.logs import event
from draftfleet.names import Split, again_id, parent_of, split_of
from draftfleet.outcomes import Counts
from draftfleet.records import Outcome, Prompt, Sample
from draftfleet.runs import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """The record of a row that is asked again: where it stands, and what it counted for."""

    row_key: str
    batch: str
    outcome: Outcome
    tokens: int
    mismatched: bool
    earlier: int = 0
    is_cut_short: bool = False

    @classmethod
    def of(cls, sample: Sample) -> Superseded:
        one = Counts.of([sample])
        return cls(
            row_key=sample.row_key,
            batch=sample.batch,
            outcome=sample.outcome,
            tokens=one.tokens,
            mismatched=bool(one.mismatched),
            earlier=one.earlier,
            is_cut_short=sample.ended is not None,
        )

    @property
    def counts(self) -> Counts:
        cut_short = {f"cut_short_{self.outcome}": 1} if self.is_cut_short else {}
        return Counts(
            **{self.outcome: 1},
            tokens=self.tokens,
            mismatched=int(self.mismatched),
            earlier=self.earlier,
            **cut_short,
        )


@dataclass(frozen=True, slots=True)
class Correction:
    """What to add to sums over all batches, in which a row counts once for each batch that asks it."""

    counts: Counts
    pending: int
    dead: int


class Again:
    """The again-batches of a run, each read once. `rows` are those that have a prompt shard, in order."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: dict[str, dict[str, Superseded]] = {}
        self._shards: dict[str, dict[str, Counts]] = {}
        self._succeeded: set[tuple[str, str]] = set()

    def look(self) -> list[str]:
        """Read what is new. Returns the names in again/, also those without a prompt shard. Raises CorruptFile."""
        found = names(self.run)
        for name in found:
            if name not in self.rows and self.run.has_prompts(name):
                rows = {row.row_key: row for row in _read(self.run, name).rows}
                self.rows[name] = rows
                self._succeeded |= {(parent_of(row.batch)[0], key) for key, row in rows.items()}
        return found

    def succeeds(self, batch: str, row_key: str) -> bool:
        """Whether another batch asks the row again that this batch holds a record of."""
        return (parent_of(batch)[0], row_key) in self._succeeded

    def before(self, batch: str, row_key: str) -> list[Superseded]:
        """The records that this batch's row supersedes, from its own predecessor to the first of all."""
        found: list[Superseded] = []
        while row := self.rows.get(parent_of(batch)[0], {}).get(row_key):
            found.append(row)
            batch = row.batch
        return found

    def correction(
        self,
        done: Collection[str],
        outstanding: Collection[str],
        split: Mapping[str, int],
        dead: Mapping[str, Sample],
        corrupt: Collection[str],
    ) -> Correction:
        """Each row once. The arguments are what the sums were made of: a batch made since then does not count yet.

        Raises CorruptFile.
        """
        self.look()  # after the listings: no batch of theirs is missed
        self._shards = {batch: rows for batch, rows in self._shards.items() if batch in done}
        records = _Records(self, set(done) - set(corrupt), split, dead)
        summed = {parent_of(batch)[0] for batches in (done, outstanding, dead) for batch in batches}
        said: list[Counts] = []
        kept: list[Counts] = []
        pending = 0
        for row_key, batches in self._batches_by_row(summed).items():
            found = [records.of(batch, row_key) for batch in batches]
            finished = [one for one in found if one is not None]
            num_outstanding = len(found) - len(finished)
            said += finished
            if num_outstanding:
                pending += 1 - num_outstanding
            else:
                kept.append(min(finished, key=rank))
        superseded = sum(self.succeeds(batch, sample.row_key) for batch, sample in dead.items())
        return Correction(Counts.total(kept) - Counts.total(said), pending, -superseded)

    def shard(self, batch: str) -> dict[str, Counts]:
        """What a sample shard says of each row; read once, since it never changes. Raises CorruptFile."""
        if batch not in self._shards:
            self._shards[batch] = self.run.outcomes(batch)
        return self._shards[batch]

    def _batches_by_row(self, summed: Collection[str]) -> dict[str, dict[str, None]]:
        """By row key the batches that ask it, the producer's first."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for name, rows in self.rows.items():
            for key, row in rows.items() if name in summed else ():
                found[key][parent_of(row.batch)[0]] = None
                found[key][name] = None
        return found


class _Records:
    """What each batch says of a row at this moment."""

    def __init__(self, again: Again, done: set[str], split: Mapping[str, int], dead: Mapping[str, Sample]) -> None:
        self._again = again
        self._done = done
        self._split = split
        self._dead: dict[str, list[Sample]] = defaultdict(list)
        self._parts: dict[str, list[str]] = defaultdict(list)
        self._changed = _not_as_noted(again.run) if again.rows else set[str]()
        self._noted = {(row.batch, key): row.counts for rows in again.rows.values() for key, row in rows.items()}
        for batch, sample in dead.items():
            self._dead[parent_of(batch)[0]].append(sample)
        for batch in done:
            if parent_of(batch)[0] in split:
                self._parts[parent_of(batch)[0]].append(batch)

    def of(self, batch: str, row_key: str) -> Counts | None:
        """None while the batch still has to say it."""
        if batch not in self._split and batch in self._done:
            noted = None if batch in self._changed else self._noted.get((batch, row_key))
            return noted or self._again.shard(batch).get(row_key)
        found = [self._again.shard(part).get(row_key) for part in self._parts[batch]]
        found += [Counts.of([sample]) for sample in self._dead[batch] if sample.row_key == row_key]
        return min((one for one in found if one is not None), key=rank, default=None)


def rank(counts: Counts) -> int:
    """Of one row: the smaller, the better."""
    return next(number for number, found in enumerate((counts.ok, counts.truncated, counts.failed)) if found)


def create(
    run: Run, samples: Iterable[Sample], *, batch_size: int, alone: Callable[[Sample], bool] = lambda _: False
) -> dict[str, int]:
    """Make batches that ask these rows again, whatever became of them. Returns the batches made, with their sizes.

    Rows that another batch asks again already are left out. Rows of which `alone` is true may end a worker or a server:
    their batches are split from the start, so that each is tried by itself. Raises StorageError.
    """
    again = Again(run)
    made: dict[str, int] = {}
    waiting: dict[tuple[Split, bool], list[Sample]] = defaultdict(list)
    for sample in samples:
        group = sample.split, alone(sample)
        waiting[group].append(sample)
        if len(waiting[group]) == batch_size:
            made |= _make(run, again, waiting.pop(group), alone=group[1])
    for group, rows in waiting.items():
        made |= _make(run, again, rows, alone=group[1])
    return made


def mend(run: Run) -> list[str]:
    """Finish what a process left that died in making a batch. Returns the batches that came to be by this call."""
    mended: list[str] = []
    for name in names(run):
        if run.has_prompts(name):
            continue
        file = _read(run, name)
        try:
            sources = {parent_of(row.batch)[0] for row in file.rows}
            prompts = {one.row_key: one for source in sorted(sources) for one in run.read_prompts(source)}
            wanted = [_with_turns(run, prompts[row.row_key], row) for row in file.rows]
        except (CorruptFile, FileNotFoundError, KeyError) as error:
            log.error(event("batch not mended", run=run.name, batch=name, error=str(error)))
            continue
        if _finish(run, name, wanted, alone=file.alone):
            mended.append(name)
    return mended


def names(run: Run) -> list[str]:
    """The names in again/, in order."""
    return sorted(name.removesuffix(".json") for name in run.storage.list(f"{run.name}/again"))


def _not_as_noted(run: Run) -> set[str]:
    """Batches whose shard may say something else than was noted of them.

    A shard never changes. But a damaged one is moved aside and made anew, and one may come late, after a grave.
    """
    moved = {name.rpartition("-")[0] for name in run.storage.list(f"{run.name}/corrupt")}
    return moved | {name.removesuffix(".json") for name in run.storage.list(f"{run.name}/dead")}


def _make(run: Run, again: Again, samples: Sequence[Sample], *, alone: bool) -> dict[str, int]:
    """One batch of these rows; none if all of them are asked again already."""
    while True:
        split = samples[0].split
        numbers = [int(name.rpartition("-")[2]) for name in again.look() if split_of(name) == split]
        asked = _half_made(again)
        left = {
            one.row_key: one
            for one in samples
            if not again.succeeds(one.batch, one.row_key) and (parent_of(one.batch)[0], one.row_key) not in asked
        }
        if not left:
            return {}
        name = again_id(split, max(numbers, default=-1) + 1)
        sources = Sources(run)
        prompts = [sources.prompt(one) for one in left.values()]
        rows = [asdict(Superseded.of(one)) for one in left.values()]
        raw = json.dumps({"created_at": time.time(), "alone": alone, "rows": rows}, indent=1).encode()
        if not run.storage.put_if_absent(_path(run, name), raw):
            continue  # another process was faster: look what it asks
        _finish(run, name, prompts, alone=alone)
        return {name: len(left)}


def _finish(run: Run, name: str, prompts: Sequence[Prompt], *, alone: bool) -> bool:
    """The prompt shard comes last: from then on there is a batch."""
    if alone:
        run.split(name, len(prompts))
    return run.write_prompts(name, prompts)


def _half_made(again: Again) -> set[tuple[str, str]]:
    """Rows that another process is about to ask, or was about to when it died."""
    half = (name for name in names(again.run) if name not in again.rows)
    return {(parent_of(row.batch)[0], row.row_key) for name in half for row in _read(again.run, name).rows}


def _with_turns(run: Run, prompt: Prompt, row: Superseded) -> Prompt:
    """With the turns that the superseded record has. Raises FileNotFoundError or CorruptFile."""
    if not row.earlier:
        return prompt
    grave = run.dead().get(row.batch)
    samples = [grave] if grave else run.read_samples(row.batch)
    return next((merged(prompt, sample) for sample in samples if sample.row_key == row.row_key), prompt)


class _File(NamedTuple):
    rows: list[Superseded]
    alone: bool


def _read(run: Run, name: str) -> _File:
    path = _path(run, name)
    try:
        content = json.loads(run.storage.read(path))
        return _File([Superseded(**row) for row in content["rows"]], bool(content["alone"]))
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFile(f"{run.storage.url}/{path} cannot be read: {error}. Restore it from a copy.") from None


def _path(run: Run, name: str) -> str:
    return f"{run.name}/again/{name}.json"
