"""Each row of a run once: the best of its records, batch after batch, in an order that depends on the run alone.

Rows stand several times where a batch was split, or where they were asked again. The records of one batch are compared
when it is read; for rows that were asked again it is settled before, from the files that say so, which batch has the
record that counts. So memory holds some batches and the keys of rows that were asked again, whatever the run's size.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from draftfleet.again import Again, rank
from draftfleet.errors import CorruptFile
from draftfleet.logs import event
from draftfleet.names import Split, is_again, parent_of, split_of
from draftfleet.outcomes import Counts, best
from draftfleet.records import Sample
from draftfleet.runs import Run

log = logging.getLogger(__name__)

READERS = 4
"""Batches read ahead: on an object store each is a round trip."""


class Kept:
    """The rows of a run as its shards are at this moment. `corrupt` says of each shard that could not be read why."""

    def __init__(self, run: Run) -> None:
        self.corrupt: dict[str, str] = {}
        self._run = run
        self._families: dict[str, list[str]] = defaultdict(list)
        for batch in run.done():
            self._families[parent_of(batch)[0]].append(batch)
        self._holder = self._holders()

    def num_batches(self, split: Split) -> int:
        return len(self._of(split))

    def batches(self, split: Split) -> Iterator[list[Sample]]:
        """For each batch of the split that is done, its rows; none of a shard that cannot be read."""
        families = iter(self._of(split))
        with ThreadPoolExecutor(READERS) as pool:
            ahead: deque[Future[list[Sample]]] = deque()
            try:
                ahead.extend(pool.submit(self._read, family) for family in islice(families, READERS))
                while ahead:
                    samples = ahead.popleft().result()
                    ahead.extend(pool.submit(self._read, family) for family in islice(families, 1))
                    yield samples
            finally:
                for future in ahead:
                    future.cancel()

    def _of(self, split: Split) -> list[str]:
        """The producer's batches in their order, then those that ask rows again."""
        found = (family for family in self._families if split_of(family) == split)
        return sorted(found, key=lambda family: (is_again(family), int(family.rpartition("-")[2])))

    def _read(self, family: str) -> list[Sample]:
        samples: list[Sample] = []
        for batch in self._families[family]:
            try:
                samples += self._run.read_samples(batch)
            except FileNotFoundError:  # moved aside since it was listed: it is done again
                continue
            except CorruptFile as error:
                self._skip(batch, error)
        return [one for key, one in best(samples).items() if self._holder.get(key, family) == family]

    def _holders(self) -> dict[str, str]:
        """For each row that was asked again, the batch that holds its best record. The first of equals holds it."""
        again = Again(self._run)
        again.look()
        unsure = self._not_as_noted()
        shards: dict[str, dict[str, Counts]] = {}
        held: dict[str, tuple[int, str]] = {}
        for name, rows in again.rows.items():
            said = self._outcomes(name)
            for key, row in rows.items():
                first = parent_of(row.batch)[0]
                if key not in held and first in unsure:
                    if first not in shards:
                        shards[first] = self._outcomes(first)
                    held[key] = rank(shards[first].get(key, row.counts)), first
                elif key not in held:
                    held[key] = rank(row.counts), first
                if key in said and rank(said[key]) < held[key][0]:
                    held[key] = rank(said[key]), name
        return {key: family for key, (_, family) in held.items()}

    def _not_as_noted(self) -> set[str]:
        """Batches that may say of a row something else than was noted when it was asked again: their shard was made
        anew, came after a grave, or is one of several."""
        run = self._run
        moved = {name.rpartition("-")[0] for name in run.storage.list(f"{run.name}/corrupt")}
        buried = {name.removesuffix(".json") for name in run.storage.list(f"{run.name}/dead")}
        return {parent_of(batch)[0] for batch in moved | buried} | set(run.split_sizes())

    def _outcomes(self, family: str) -> dict[str, Counts]:
        """What the shards of a batch say of its rows, without their texts."""
        found: dict[str, Counts] = {}
        for batch in self._families.get(family, ()):
            try:
                rows = self._run.outcomes(batch)
            except FileNotFoundError:
                continue
            except CorruptFile as error:
                self._skip(batch, error)
                continue
            for key, counts in rows.items():
                if key not in found or rank(counts) < rank(found[key]):
                    found[key] = counts
        return found

    def _skip(self, batch: str, error: CorruptFile) -> None:
        if batch not in self.corrupt:
            log.error(event("shard skipped", run=self._run.name, batch=batch, error=error))
        self.corrupt[batch] = str(error)
