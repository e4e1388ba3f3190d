"""Finished rows of batches that are not done: written every second or so, read by whoever gets the batch next."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace

from draftfleet.names import batch_of_partial, parent_of, parts_of
from draftfleet.outcomes import best
from draftfleet.records import Sample
from draftfleet.runs import Run

MOST_FILES = 60
"""Of one process. Others list the folder for each batch that they take."""


class Partials:
    """The partials of one run. Of each file only its batches are remembered: the rows of a whole fleet are many.

    A file never changes. It is read when it is first seen, and again if the node takes one of its batches. Once a
    process has written MOST_FILES of them, it puts what is still wanted of its own into one.
    """

    def __init__(self, run: Run, process: str) -> None:
        self._run = run
        self._process = process
        self._lock = threading.Lock()
        self._files: dict[str, set[str]] = {}
        self._num_written = 0

    def earlier(self, batch: str, row_keys: Collection[str]) -> dict[str, Sample]:
        """What earlier holders finished of a batch, by row key. A single row finds itself in its parent's rows."""
        names = {batch, parent_of(batch)[0]}
        with self._lock:
            found = self._read(names)
        kept = best(sample for sample in found if sample.row_key in row_keys)
        return {key: replace(sample, batch=batch) for key, sample in kept.items()}

    def write(self, samples: list[Sample]) -> None:
        """Put them as one file. Raises StorageUnwritable."""
        with self._lock:
            self._put(samples)
            own = [name for name in self._files if name.startswith(f"{self._process}-")]
            if len(own) > MOST_FILES:
                self._merge(own)

    def clean(self, batch: str) -> int:
        """The batch is done: delete the files whose batches are all done, or of which no row can be read. How many."""
        names = {batch, parent_of(batch)[0]}
        over = {batch: True}
        with self._lock:
            deleted = [
                name
                for name, batches in self._files.items()
                if not batches or (batches & names and all(self._is_over(one, over) for one in batches))
            ]
            for name in deleted:
                self._run.delete_partial(name)
                del self._files[name]
        return len(deleted)

    def _put(self, samples: list[Sample]) -> None:
        name = self._run.write_partial(self._process, self._num_written, samples)
        self._num_written += 1
        self._files[name] = _batches(samples)

    def _merge(self, names: list[str]) -> None:
        """Of what is cut off in between, rows stand twice: the better one counts."""
        over: dict[str, bool] = {}
        samples = [sample for name in names for sample in self._run.read_partial(name)]
        if wanted := [sample for sample in samples if not self._is_over(sample.batch, over)]:
            self._put(wanted)
        for name in names:
            self._run.delete_partial(name)
            del self._files[name]

    def _read(self, batches: set[str]) -> list[Sample]:
        """The rows of these batches, in order of the files."""
        found: list[Sample] = []
        files: dict[str, set[str]] = {}
        for name in self._run.partials():
            known = self._files.get(name) or _named(name)
            if known is None or known & batches:
                samples = self._run.read_partial(name)
                known = _batches(samples)
                found += [sample for sample in samples if sample.batch in batches]
            files[name] = known
        self._files = files
        return found

    def _is_over(self, batch: str, over: dict[str, bool]) -> bool:
        """Whether nobody will ask for these rows any more. `over` remembers the answers of one cleaning."""
        if batch not in over:
            over[batch] = self._run.is_done(batch) or self._are_parts_over(batch)
        return over[batch]

    def _are_parts_over(self, batch: str) -> bool:
        if not self._run.is_split(batch):
            return False
        parts = parts_of(batch, self._run.split_sizes()[batch])
        return all(self._run.is_done(part) or self._run.is_dead(part) for part in parts)


def _named(name: str) -> set[str] | None:
    """The batches of a file that need not be read for them."""
    batch = batch_of_partial(name)
    return None if batch is None else {batch}


def _batches(samples: list[Sample]) -> set[str]:
    return {sample.batch for sample in samples}
