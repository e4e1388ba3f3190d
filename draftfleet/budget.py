"""The token budget of a run: once its completion tokens reach it, the run is paused.

One process at a time looks, by a lock in Redis that passes on when its holder is gone. It adds up the shards and what
the workers report of rows that stand in no shard yet. A report may be two seconds old, and name rows whose batch was
committed meanwhile: so the shards are those of the look before, and no row is counted twice. What comes too late for
one look counts at the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress

import redis
from redis.exceptions import LockError

from draftfleet import control, live
from draftfleet.accounting import Accountant
from draftfleet.errors import StorageError
from draftfleet.logs import event
from draftfleet.runs import Run

log = logging.getLogger(__name__)

LOOK_S = 2.5
"""Longer than a report may be old."""

LEASE_S = 30.0

SHARE = 0.1
"""Of its time that a process spends on adding up: a large run is looked at less often."""


def reached(budget: int) -> str:
    """How the reason begins for which such a run is paused."""
    return f"token budget of {budget} reached"


class Budgets:
    """Looks after the budgets of some runs, on behalf of all processes that look after runs of this model."""

    def __init__(self, client: redis.Redis, model: str) -> None:
        self._client = client
        self._lock = client.lock(f"draftfleet:budgets:{model}", timeout=LEASE_S, blocking=False, thread_local=False)
        self._accountants: dict[str, Accountant] = {}
        self._shards: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def check(self, runs: Iterable[Run]) -> list[str]:
        """Pause the runs whose budget is reached; returns their names. Nothing if another process looks.

        May raise redis.RedisError.
        """
        if not self._leads():
            return []
        return [run.name for run in runs if self._guarded(run)]

    def _guarded(self, run: Run) -> bool:
        try:
            return self._check(run)
        except (StorageError, OSError) as error:  # the guard says that the storage is away
            log.debug(event("budget not looked at", run=run.name, error=str(error)))
            return False

    def _leads(self) -> bool:
        with suppress(LockError):  # not held, or no more
            return bool(self._lock.reacquire())
        self._shards.clear()
        return bool(self._lock.acquire())

    def _check(self, run: Run) -> bool:
        controlled = control.read(run)
        budget = controlled.token_budget
        if budget is None or not controlled.is_running:
            self._shards.pop(run.run_id, None)
            return False
        if time.monotonic() < self._due.get(run.run_id, 0.0):
            return False
        before = self._shards.get(run.run_id)
        tokens = 0 if before is None else before + self._unshared(run)
        begun = time.monotonic()
        accountant = self._accountants.setdefault(run.run_id, Accountant(run))
        self._shards[run.run_id] = in_shards = accountant.account().tokens
        self._due[run.run_id] = time.monotonic() + (time.monotonic() - begun) / SHARE
        tokens = max(tokens, in_shards)
        if tokens < budget:
            return False
        reason = f"{reached(budget)}: {tokens} tokens"
        now = control.change(run, self._client, only_if=controlled, state="paused", reason=reason)
        if now.is_running:  # the budget was raised just now
            return False
        log.warning(event("run paused", run=run.name, reason=reason))
        return True

    def _unshared(self, run: Run) -> int:
        """Tokens of rows that are finished somewhere and stand in no shard."""
        reports = [one for worker in live.read(self._client) for one in worker.runs]
        return sum(report.tokens for report in reports if report.run_id == run.run_id)
