"""Finished rows of batches that are not done: written every few seconds, read by whoever gets the batch next."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace

from draftfleet.names import parent_of, parts_of
from draftfleet.outcomes import best
from draftfleet.records import Sample
from draftfleet.runs import Run


class Partials:
    """The partials of one run, as this process knows them. A file never changes, so each is read once."""

    def __init__(self, run: Run, process: str) -> None:
        self._run = run
        self._process = process
        self._lock = threading.Lock()
        self._files: dict[str, list[Sample]] = {}
        self._num_written = 0

    def earlier(self, batch: str, row_keys: Collection[str]) -> dict[str, Sample]:
        """What earlier holders finished of a batch, by row key. A single row finds itself in its parent's rows."""
        names = {batch, parent_of(batch)[0]}
        with self._lock:
            self._read_new()
            found = [sample for samples in self._files.values() for sample in samples if sample.batch in names]
        kept = best(sample for sample in found if sample.row_key in row_keys)
        return {key: replace(sample, batch=batch) for key, sample in kept.items()}

    def write(self, samples: list[Sample]) -> None:
        """Put them as one file. Raises StorageUnwritable."""
        with self._lock:
            name = self._run.write_partial(self._process, self._num_written, samples)
            self._num_written += 1
            self._files[name] = samples

    def clean(self, batch: str) -> int:
        """The batch is done: delete the files whose batches are all done, or of which no row can be read. How many."""
        names = {batch, parent_of(batch)[0]}
        over = {batch: True}
        with self._lock:
            deleted = [
                name
                for name, samples in self._files.items()
                if not samples
                or (
                    any(sample.batch in names for sample in samples)
                    and all(self._is_over(sample.batch, over) for sample in samples)
                )
            ]
            for name in deleted:
                self._run.delete_partial(name)
                del self._files[name]
        return len(deleted)

    def _read_new(self) -> None:
        names = self._run.partials()
        for gone in self._files.keys() - set(names):
            del self._files[gone]
        for name in names:
            if name not in self._files:
                self._files[name] = self._run.read_partial(name)

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
