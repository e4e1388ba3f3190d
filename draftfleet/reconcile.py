"""What is missing is published again. The queue may lose or double messages; this makes progress certain.

Two looks at the world, by every worker: often, at the claims in Redis, for holders that died; now and then, at the
storage, for batches that nobody has, wherever their message went.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import redis
from celery import Celery

from draftfleet import settings
from draftfleet.claims import Claims, Lapsed, published_key
from draftfleet.errors import CorruptFile, RunMissing, StorageError
from draftfleet.logs import event
from draftfleet.names import BATCH, NAME, parts_of
from draftfleet.queue import publish, publish_training, queued
from draftfleet.records import LONGEST_SHOWN, Prompt, Sample
from draftfleet.runs import Run
from draftfleet.storage import Storage

log = logging.getLogger(__name__)

TRAIN_CLAIM = "train:"
"""Claims so named are on drafters, the others on batches."""


class Reconciler:
    """Looks after all runs in a storage that ask for one of `models`; for every run where `models` is None."""

    def __init__(
        self,
        app: Celery,
        client: redis.Redis,
        storage: Storage,
        knobs: settings.Claims,
        models: Collection[str] | None = None,
    ) -> None:
        self._app = app
        self._client = client
        self._storage = storage
        self._knobs = knobs
        self._models = models
        self._runs: dict[str, Run] = {}
        self._finished: dict[str, dict[str, Any] | None] = {}
        self._owed: dict[str, deque[Lapsed]] = defaultdict(deque)

    def discover(self) -> list[Run]:
        """The runs to look after, read from storage. One whose folder is gone may come back as another run."""
        names = set(self._storage.folders())
        for name in set(self._runs) - names:
            self._runs.pop(name, None)
        for name in names - set(self._runs):
            try:
                run = Run.open(self._storage, name)
            except (RunMissing, CorruptFile):  # not a run: somebody's folder beside ours
                continue
            if self._models is None or model_of(run) in self._models:
                self._runs[name] = run
        return list(self._runs.values())

    def sweep(self) -> int:
        """Publish again what dead holders left. Returns how many claims had lapsed. Redis alone, unless one had."""
        return self._over_runs(self._sweep)

    def republish(self) -> int:
        """Compare the storage with the queue and publish what is missing. One process at a time; others get 0."""
        lock = self._client.lock("draftfleet:reconciling", timeout=300, blocking=False)
        if not lock.acquire():
            return 0
        try:
            self.discover()
            return self._over_runs(self._republish)
        finally:
            if lock.owned():
                lock.release()

    def _over_runs(self, look: Callable[[Run], int]) -> int:
        """The sum over all runs. One whose files are at fault does not keep the others waiting."""
        total = 0
        for run in list(self._runs.values()):
            try:
                total += look(run)
            except (StorageError, OSError) as error:
                log.error(event("run not reconciled", run=run.name, error=str(error)))
        return total

    def _sweep(self, run: Run) -> int:
        """The claims are gone from Redis: one that cannot be seen to now is owed, and seen to at the next sweep."""
        lapsed = Claims(self._client, run.run_id, self._knobs, "reconciler").sweep()
        for claim in lapsed:
            name = claim.name[:LONGEST_SHOWN]
            log.warning(event("claim lapsed", run=run.name, name=name, attempts=claim.attempts))
        owed = self._owed[run.run_id]
        owed.extend(lapsed)
        while owed:
            try:
                self._again(run, owed[0])
            except Exception:
                owed.rotate(-1)
                raise
            owed.popleft()
        return len(lapsed)

    def _again(self, run: Run, claim: Lapsed) -> None:
        if re.fullmatch(BATCH, claim.name):
            self._work_again(run, claim)
        elif claim.name.startswith(TRAIN_CLAIM) and re.fullmatch(NAME, claim.name.removeprefix(TRAIN_CLAIM)):
            self._train_again(run, claim)
        else:  # whoever can write to Redis can put any name there, and names become paths
            log.error(event("claim dropped", run=run.name, name=claim.name[:LONGEST_SHOWN], reason="no name of ours"))

    def _train_again(self, run: Run, claim: Lapsed) -> None:
        drafter = claim.name.removeprefix(TRAIN_CLAIM)
        if claim.attempts < self._knobs.max_attempts:
            publish_training(self._app, run, drafter)
        else:
            log.error(event("training given up", run=run.name, drafter=drafter, attempts=claim.attempts))

    def _work_again(self, run: Run, claim: Lapsed) -> None:
        if run.is_done(claim.name):
            return
        if claim.attempts < self._knobs.max_attempts:
            self._publish(run, [claim.name])
            return
        try:
            prompts = run.read_prompts(claim.name)
        except (CorruptFile, FileNotFoundError) as error:  # its neighbours go on; `status` keeps showing it as pending
            log.error(event("batch has no prompts", run=run.name, batch=claim.name, error=str(error)))
            return
        if len(prompts) == 1:
            run.bury(claim.name, _given_up(run, claim, prompts[0]))
            log.error(event("row given up", run=run.name, batch=claim.name, attempts=claim.attempts))
        else:
            run.split(claim.name, len(prompts))
            self._publish(run, parts_of(claim.name, len(prompts)))
            log.warning(event("batch split", run=run.name, batch=claim.name, rows=len(prompts)))

    def _republish(self, run: Run) -> int:
        sealed = run.sealed()
        if sealed is not None and self._finished.get(run.name) == sealed:
            return 0
        outstanding = run.outstanding()
        if sealed is not None and not outstanding:
            self._finished[run.name] = sealed
        missing = self._missing(run, outstanding)
        if missing:
            log.warning(event("missing batches published again", run=run.name, batches=len(missing)))
            self._publish(run, missing)
        return len(missing)

    def _missing(self, run: Run, outstanding: Sequence[str]) -> list[str]:
        """Batches with no shard, no claim, and no message: published, but not lately, while the queue is empty."""
        if not outstanding:
            return []
        claimed = Claims(self._client, run.run_id, self._knobs, "reconciler").held()
        now_s = int(self._client.time()[0])
        stamps = self._client.hmget(published_key(run.run_id), list(outstanding))
        patience_s = self._knobs.republish_s if queued(self._client, model_of(run)) else self._knobs.grace_s
        return [
            batch
            for batch, stamp in zip(outstanding, stamps, strict=True)
            if batch not in claimed and now_s - int(stamp or 0) > patience_s
        ]

    def _publish(self, run: Run, batches: Sequence[str]) -> None:
        publish(self._app, self._client, run, model_of(run), batches, retry=True)


def model_of(run: Run) -> str:
    """The model that a run asks for: it names the queue."""
    return str(run.info.content["target.model"])


def _given_up(run: Run, claim: Lapsed, prompt: Prompt) -> Sample:
    return Sample(
        run_id=run.run_id,
        run=run.name,
        batch=claim.name,
        row_key=prompt.row_key,
        prompt_id=prompt.prompt_id,
        split=prompt.split,
        messages=prompt.messages,
        tools=prompt.tools,
        outcome="failed",
        error=f"the worker ended {claim.attempts} times while this row was the only one of its batch",
        model=model_of(run),
        attempt=claim.attempts,
    )
