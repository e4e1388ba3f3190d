"""Rows that are asked again: in batches of their own, whose rows supersede what earlier batches said of them.

    RUN/prompts/train-again-000000.jsonl.gz    a prompt shard like any other: workers know no difference
        again/train-again-000000.json          for each row of it, which record of which batch it supersedes

Shards never change, so a row that is asked again has several records. It counts once: as pending while any batch that
asks it is outstanding, then as the best of them (draftfleet.outcomes). It is asked from its beginning, or, where its
answer was cut, asked to go on. A record is superseded once: who asks for it again finds its successor, and a successor
may be superseded in its turn.

The file in `again/` comes first and its number is the next one, put only if absent: of two processes that make a batch
at the same moment one is told, looks again, and leaves out what the other asks. Without its prompt shard it means
nothing; `mend` finishes it.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from draftfleet.errors import CorruptFile
from draftfleet.names import parent_of
from draftfleet.outcomes import Counts, rank
from draftfleet.records import Outcome, Sample
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
    not_continued: int


class Again:
    """The again-batches of a run, each read once. `rows` are those that have a prompt shard, in order."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: dict[str, dict[str, Superseded]] = {}
        self._shards: dict[str, dict[str, Counts]] = {}
        self._successors: dict[tuple[str, str], str] = {}

    def look(self) -> list[str]:
        """Read what is new. Returns the names in again/, also those without a prompt shard. Raises CorruptFile."""
        found = names(self.run)
        for name in found:
            if name not in self.rows and self.run.has_prompts(name):
                rows = {row.row_key: row for row in read(self.run, name).rows}
                self.rows[name] = rows
                self._successors |= {(parent_of(row.batch)[0], key): name for key, row in rows.items()}
        return found

    def succeeds(self, batch: str, row_key: str) -> bool:
        """Whether another batch asks the row again that this batch holds a record of."""
        return (parent_of(batch)[0], row_key) in self._successors

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
        pending = not_continued = 0
        for row_key, batches in self._batches_by_row(summed).items():
            found = [records.of(batch, row_key) for batch in batches]
            finished = [one for one in found if one is not None]
            num_outstanding = len(found) - len(finished)
            said += finished
            if num_outstanding:
                pending += 1 - num_outstanding
            else:
                kept.append(min(finished, key=rank))
                not_continued += kept[-1].truncated and finished[-1].failed
        no_letter = sum(
            self.succeeds(batch, sample.row_key)
            or any(row.outcome != "failed" for row in self.before(batch, sample.row_key))
            for batch, sample in dead.items()
        )
        return Correction(Counts.total(kept) - Counts.total(said), pending, -no_letter, not_continued)

    def after(self, batch: str, row_key: str) -> list[str]:
        """The batches that ask the row again that this batch holds a record of, from the next to the last."""
        found: list[str] = []
        batch = parent_of(batch)[0]
        while following := self._successors.get((batch, row_key)):
            found.append(batch := following)
        return found

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


def names(run: Run) -> list[str]:
    """The names in again/, in order."""
    return sorted(name.removesuffix(".json") for name in run.storage.list(f"{run.name}/again"))


def _not_as_noted(run: Run) -> set[str]:
    """Batches whose shard may say something else than was noted of them.

    A shard never changes. But a damaged one is moved aside and made anew, and one may come late, after a grave.
    """
    moved = {name.rpartition("-")[0] for name in run.storage.list(f"{run.name}/corrupt")}
    return moved | {name.removesuffix(".json") for name in run.storage.list(f"{run.name}/dead")}


class File(NamedTuple):
    rows: list[Superseded]
    alone: bool
    continued: dict[str, tuple[str, int]]
    """By row key the batch of the answer that goes on, and its budget."""


def read(run: Run, name: str) -> File:
    path = path_of(run, name)
    try:
        content = json.loads(run.storage.read(path))
        rows = [Superseded(**row) for row in content["rows"]]
        return File(
            rows, bool(content["alone"]), {key: tuple(one) for key, one in content.get("continued", {}).items()}
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFile(f"{run.storage.url}/{path} cannot be read: {error}. Restore it from a copy.") from None


def path_of(run: Run, name: str) -> str:
    return f"{run.name}/again/{name}.json"
