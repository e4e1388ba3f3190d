"""The batches that this process holds: their claims are renewed, their finished rows are saved."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable

from draftfleet.errors import StorageError
from draftfleet.index import Index
from draftfleet.live import RunReport
from draftfleet.logs import event
from draftfleet.outcomes import Counts
from draftfleet.records import Sample
from workers.batch import Batch
from workers.guard import Guard
from workers.partials import Partials
from workers.tally import Tally

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Run id and batch."""


class Holdings:
    """A batch is first reserved by its key, then held with its claim, until its task ends.

    `on_lost` is called, from the thread that renews, with a batch whose claim another process has now.
    """

    def __init__(self, guard: Guard, on_lost: Callable[[Batch], object], tally: Tally | None = None) -> None:
        self._guard = guard
        self._on_lost = on_lost
        self._tally = tally or Tally()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._saving = threading.Lock()
        self._reserved: set[Key] = set()
        self._settling: set[Key] = set()
        self._batches: dict[Key, tuple[Batch, Partials]] = {}
        self._indexes: dict[str, Index] = {}

    def reserve(self, key: Key) -> bool:
        """False if this process is at work on it: Redis may have forgotten our claim and given the message again."""
        with self._lock:
            if key in self._reserved:
                return False
            self._reserved.add(key)
            return True

    def hold(self, batch: Batch, partials: Partials) -> None:
        with self._lock:
            self._batches[batch.key] = batch, partials
            self._indexes[batch.run.run_id] = batch.run.index

    def drop(self, key: Key) -> None:
        """Its claim is no longer renewed. It stays reserved until its task has ended."""
        with self._lock:
            self._batches.pop(key, None)
            self._settling.add(key)

    def free(self, key: Key) -> None:
        with self._lock:
            self._batches.pop(key, None)
            self._reserved.discard(key)
            self._settling.discard(key)
            self._freed.notify_all()

    def wait_until_free(self, timeout_s: float) -> int:
        """Until every task has ended. Returns how many have not."""
        with self._lock:
            self._freed.wait_for(lambda: not self._reserved, timeout_s)
            return len(self._reserved)

    @property
    def num_settling(self) -> int:
        """Batches that are done or given back, and whose tasks still put things away."""
        return len(self._settling)

    def all(self) -> list[Batch]:
        with self._lock:
            return [batch for batch, _ in self._batches.values()]

    def renew(self) -> bool:
        """Renew every claim, one round trip per run; False if there is none.

        Also of batches that are stopped: to give one back, its rows have to be saved, and the storage may be away.
        May raise redis.RedisError: then the work goes on unclaimed.
        """
        by_run: dict[str, list[Batch]] = defaultdict(list)
        for batch in self.all():
            if batch.stopped != "lost":
                by_run[batch.run.run_id].append(batch)
        for batches in by_run.values():
            renewed = batches[0].claims.renew({batch.name: batch.holding for batch in batches})
            for batch in batches:
                self._renewed(batch, renewed[batch.name])
        return bool(by_run)

    def _renewed(self, batch: Batch, renewal: str) -> None:
        if renewal == "kept":
            return
        held = self._batches.get(batch.key)
        if held is None or held[0] is not batch:  # it was released while we asked: let go of what we took again
            if renewal == "retaken":
                batch.claims.release(batch.name, batch.token)
            return
        self._tally.claim("lost" if renewal == "lost" else "retaken")
        log.warning(event(f"claim {renewal}", run=batch.run.name, batch=batch.name, attempt=batch.attempt))
        if renewal == "lost":
            self._on_lost(batch)

    def checkpoint(self) -> int:
        """Write the rows finished since the last time, one file per run, and the index. Returns how many rows.

        Waits while the storage cannot be written; raises StorageUnwritable only if the worker is told to stop.
        """
        with self._saving:
            by_partials: dict[Partials, list[tuple[Batch, list[Sample]]]] = defaultdict(list)
            with self._lock:
                held = list(self._batches.values())
            for batch, partials in held:
                if (samples := batch.unsaved()) and not batch.is_complete:
                    by_partials[partials].append((batch, samples))
            for partials, rows in by_partials.items():
                flat = [sample for _, samples in rows for sample in samples]
                self._guard.run("writing finished rows", lambda p=partials, f=flat: p.write(f))
                self._tally.checkpoint(len(flat))
                for batch, samples in rows:
                    batch.saved(samples)
            with self._lock:
                indexes = list(self._indexes.values())
            for index in indexes:
                self._guard.run("writing the shard index", index.flush)
            return sum(len(samples) for rows in by_partials.values() for _, samples in rows)

    def close(self) -> None:
        """The tasks have ended: write the index of what they committed. What cannot be written is filled in later."""
        for index in self._indexes.values():
            try:
                index.flush()
            except (StorageError, OSError) as error:
                log.warning(event("shard index not written", error=str(error)))

    def reports(self) -> list[RunReport]:
        """Per run, the rows that are finished here and stand in no shard."""
        totals: dict[tuple[str, str], Counts] = defaultdict(Counts)
        for batch in self.all():
            totals[batch.run.name, batch.run.run_id] += batch.counts()
        return [
            RunReport(
                run=run, run_id=run_id, ok=sum_.ok, truncated=sum_.truncated, failed=sum_.failed, tokens=sum_.tokens
            )
            for (run, run_id), sum_ in totals.items()
        ]
