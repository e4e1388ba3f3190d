"""Orders from afar: which runs this process may work on, in which order, and whether it shall drain.

Of the runs that batches are held of they are looked at every two seconds, of others when a message comes. Rows in
flight of a run that is paused may finish for as long as a drain would wait, since their tokens are paid for and the
slots that get free go to other runs at once. Those of a run that is cancelled are broken off: nobody waits for them.
Either way finished rows are saved and claims are released without an attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import redis

from draftfleet import control, drain
from draftfleet.control import Control
from draftfleet.errors import StorageError
from draftfleet.logs import event
from draftfleet.runs import Run
from workers.batch import Batch
from workers.holdings import Holdings

log = logging.getLogger(__name__)

LOOK_S = 2.0

LetGo = Callable[[Sequence[Batch], float], object]
"""Starts no more rows of these batches, and waits for those in flight for at most so many seconds."""


class Orders:
    """`look` is a chore. `on_change` is called when rows may be started that could not before, or in another order."""

    def __init__(
        self,
        client: redis.Redis,
        process: str,
        holdings: Holdings,
        *,
        let_go: LetGo,
        drain: Callable[[], object],
        on_change: Callable[[], object],
        patience_s: float,
    ) -> None:
        self._client = client
        self._process = process
        self._holdings = holdings
        self._let_go = let_go
        self._drain = drain
        self._on_change = on_change
        self._patience_s = patience_s
        self._known: dict[str, Control] = {}
        self._looked_at: dict[str, float] = {}
        self._letting_go: set[str] = set()
        self._told_to_drain = False

    def open(self, run: Run) -> None:
        """From now on it is looked after. Raises CorruptFile or StorageUnreadable."""
        self._looked_at[run.run_id] = time.monotonic()
        self._known[run.run_id] = control.read(run)

    def rank(self, run_id: str) -> int:
        """The rows of a run of rank 0 go first."""
        known = self._known.get(run_id)
        return known.rank if known else 0

    def of(self, run: Run) -> Control:
        """What holds for an open run. One that is not running is looked at again: the order may be taken back since."""
        is_old = time.monotonic() - self._looked_at[run.run_id] > LOOK_S
        if is_old or not self._known[run.run_id].is_running:
            self._look_at(run)
        return self._known[run.run_id]

    def look(self) -> None:
        """May raise redis.RedisError; runs are looked at all the same."""
        for run in {batch.run.run_id: batch.run for batch in self._holdings.all()}.values():
            self._look_at(run)
        self._stop_batches()
        if not self._told_to_drain and drain.is_ordered(self._client, self._process):
            self._told_to_drain = True
            log.info(event("drain ordered", process=self._process))
            self._drain()

    def _look_at(self, run: Run) -> None:
        self._looked_at[run.run_id] = time.monotonic()
        try:
            now = control.read(run)
        except (StorageError, OSError) as error:  # what was known holds on; the guard says that the storage is away
            log.debug(event("control not read", run=run.name, error=str(error)))
            return
        before, self._known[run.run_id] = self._known[run.run_id], now
        if now.state != before.state:
            log.info(event(f"run {'resumed' if now.is_running else now.state}", run=run.name, reason=now.reason))
        if now != before:
            self._on_change()

    def _stop_batches(self) -> None:
        for state, patience_s in (("paused", self._patience_s), ("cancelled", 0.0)):
            batches = [
                batch
                for batch in self._holdings.all()
                if self._known[batch.run.run_id].state == state
                and not batch.stopped
                and (batch.token not in self._letting_go or not patience_s)
            ]
            if batches:
                self._letting_go |= {batch.token for batch in batches}
                threading.Thread(
                    target=self._stop, args=[batches, state, patience_s], name=f"let-go-{state}", daemon=True
                ).start()

    def _stop(self, batches: Sequence[Batch], state: str, patience_s: float) -> None:
        try:
            self._let_go(batches, patience_s)
        finally:
            for batch in batches:
                if not batch.is_complete:
                    batch.stop(state)
                self._letting_go.discard(batch.token)
