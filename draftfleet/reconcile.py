"""What is missing is published again. The queue may lose or double messages; this makes progress certain.

Two looks at the world, by every worker: often, at the claims in Redis, for holders that died; now and then, at the
storage, for batches that nobody has, wherever their message went.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import redis
from celery import Celery
from redis.exceptions import LockError

from draftfleet import again, cleanup, control, drafters, drawing, settings
from draftfleet.claims import Claims, Lapsed, published_key
from draftfleet.control import Control
from draftfleet.conversations import FAILED, asks_every_turn, ended, next_turn
from draftfleet.errors import CorruptFile, RunError, RunMissing, RunNewer, StorageError
from draftfleet.index import fill
from draftfleet.letters import note_unreadable
from draftfleet.logs import event
from draftfleet.names import BATCH, NAME, parent_of, parts_of
from draftfleet.outcomes import best
from draftfleet.queue import ENDED, TRAIN_FIELD, chunks, note_ended, publish, publish_training, queued
from draftfleet.records import Prompt, Sample
from draftfleet.runs import TOMBSTONES, Run
from draftfleet.storage import Storage
from draftfleet.wire import LONGEST_SHOWN

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
        self._known: dict[str, Run] = {}
        self._runs: dict[str, Run] = {}
        self._finished: dict[str, tuple[tuple[dict[str, Any], list[str]], float]] = {}
        self._owed: dict[str, deque[Lapsed]] = defaultdict(deque)
        self._unseen: dict[str, set[str]] = {}

    @property
    def runs(self) -> list[Run]:
        """Those that the last `discover` found."""
        return list(self._runs.values())

    def discover(self) -> list[Run]:
        """The runs to look after, read from storage. One whose folder is gone may come back as another run."""
        names = set(self._storage.folders())
        deleted = {name.removesuffix(".json") for name in self._storage.list(TOMBSTONES)}
        known = {name: run for name, run in self._known.items() if name in names and run.run_id not in deleted}
        for name in names - set(known):
            try:
                known[name] = Run.open(self._storage, name)
            except (RunMissing, RunNewer, CorruptFile):  # somebody's folder beside ours, or left to newer workers
                continue
        self._known = known  # as a whole: chores of several threads look
        self._runs = {name: run for name, run in known.items() if self._models is None or model_of(run) in self._models}
        return self.runs

    def sweep(self, has_ended: Callable[[str], bool] | None = None) -> int:
        """Publish again what dead holders left. Returns how many claims had lapsed. Redis alone, unless one had.

        `has_ended` says of an owner whether it is known to be no more: nobody waits for its claims to lapse.
        """
        return self._over_runs(lambda run: self._sweep(run, has_ended))

    def republish(self) -> int:
        """Compare the storage with the queue and publish what is missing. One process at a time; others get 0.

        One that dies with its lock keeps the others out for as long as a claim lives. Two at once would do no harm.
        """
        lock = self._client.lock("draftfleet:reconciling", timeout=self._knobs.ttl_s, blocking=False)
        if not lock.acquire():
            return 0
        try:
            self.discover()
            cleanup.remove_keys(self._client, self._storage)
            self.ask_for_trainings()
            return self._over_runs(self._republish)
        finally:
            with suppress(LockError):  # it lapsed meanwhile: what was published stays right
                lock.release()

    def ask_for_trainings(self) -> int:
        """Publish again the trainings whose message was lost. Returns how many."""
        return self._over_runs(self._ask_for_trainings)

    def _over_runs(self, look: Callable[[Run], int]) -> int:
        """The sum over all runs. One whose files are at fault does not keep the others waiting."""
        total = 0
        for run in self.runs:
            try:
                total += look(run)
            except (StorageError, RunError, OSError) as error:
                log.error(event("run not reconciled", run=run.name, error=str(error)))
        return total

    def _sweep(self, run: Run, has_ended: Callable[[str], bool] | None) -> int:
        """The claims are gone from Redis: one that cannot be seen to now is owed, and seen to at the next sweep."""
        claims = Claims(self._client, run.run_id, self._knobs, "reconciler")
        lapsed = claims.sweep(filter(has_ended, claims.owners()) if has_ended else ())
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
            publish_training(self._app, self._client, run, drafter)
        else:
            note_ended(self._client, run.run_id, drafter)
            log.error(event("training given up", run=run.name, drafter=drafter, attempts=claim.attempts))

    def _ask_for_trainings(self, run: Run) -> int:
        """Drafters that were asked for, are not finished, and whose message nobody has: Redis forgot that it was sent.

        Only at the second look in a row: a trainer needs a moment to renew a claim that was forgotten, too. One that
        was sent lately is in the queue. It may get lost on its way to a trainer: after `republish_s` it is sent again.
        """
        asked = drafters.unfinished(run)
        if not asked:
            return 0
        claimed = Claims(self._client, run.run_id, self._knobs, "reconciler").held()
        stamps = self._client.hmget(published_key(run.run_id), [TRAIN_FIELD + drafter for drafter in asked])
        now_s = int(self._client.time()[0])
        lost = [
            drafter
            for drafter, stamp in zip(asked, stamps, strict=True)
            if TRAIN_CLAIM + drafter not in claimed
            and int(stamp or 0) != ENDED
            and now_s - int(stamp or 0) > self._knobs.republish_s
        ]
        unseen, self._unseen[run.run_id] = self._unseen.get(run.run_id, set()), set(lost)
        lost = [drafter for drafter in lost if drafter in unseen]
        for drafter in lost:
            publish_training(self._app, self._client, run, drafter)
            log.warning(event("lost training asked for again", run=run.name, drafter=drafter))
        return len(lost)

    def _work_again(self, run: Run, claim: Lapsed) -> None:
        parent, row = parent_of(claim.name)
        if run.is_done(claim.name) or run.is_done(parent) or not (controlled := control.read(run)).is_running:
            return
        if claim.attempts < self._knobs.max_attempts or (row is not None and claim.others):
            self._publish(run, [claim.name], controlled)
            return
        try:
            prompts = run.read_prompts(claim.name)
        except (CorruptFile, FileNotFoundError) as error:  # its neighbours go on; `status` keeps showing it as pending
            log.error(event("batch has no prompts", run=run.name, batch=claim.name, error=str(error)))
            note_unreadable(run, claim.name, error, worker="")
            return
        if row is not None:
            run.bury(claim.name, _given_up(run, claim, prompts[0]))
            log.error(event("row given up", run=run.name, batch=claim.name, attempts=claim.attempts))
        else:
            run.split(claim.name, len(prompts))
            self._publish(run, parts_of(claim.name, len(prompts)), controlled)
            log.warning(event("batch split", run=run.name, batch=claim.name, rows=len(prompts)))

    def _republish(self, run: Run) -> int:
        controlled = control.read(run)
        if not controlled.is_running:  # `resume` publishes what is outstanding then
            return 0
        sealed = run.sealed()
        asked_again = again.names(run)  # a finished run gets work again by them
        finished, looked_at = self._finished.get(run.run_id, (None, 0.0))
        # Now and then it is looked at all the same: somebody may have removed a shard by hand.
        if finished == (sealed, asked_again) and time.monotonic() - looked_at < self._knobs.republish_s:
            return 0
        done = run.done_bytes()
        outstanding = run.outstanding(done)
        missing = self._missing(run, outstanding)
        if missing:
            log.warning(event("missing batches published again", run=run.name, batches=len(missing)))
            self._publish(run, missing, controlled)
        if fill(run, done) and sealed is not None and not outstanding:
            cleanup.tidy(self._client, run)
            if set(asked_again) <= set(run.batches()):  # the shard of one that is being made comes after its name
                self._finished[run.run_id] = (sealed, asked_again), time.monotonic()
        return len(missing)

    def _missing(self, run: Run, outstanding: Sequence[str]) -> list[str]:
        """Batches with no shard, no claim, and no message: published, but not lately, while the queue is empty."""
        if not outstanding:
            return []
        claimed = Claims(self._client, run.run_id, self._knobs, "reconciler").held()
        now_s = int(self._client.time()[0])
        key = published_key(run.run_id)
        stamps = [stamp for names in chunks(outstanding) for stamp in self._client.hmget(key, names)]
        patience_s = self._knobs.republish_s if queued(self._client, model_of(run)) else self._knobs.grace_s
        return [
            batch
            for batch, stamp in zip(outstanding, stamps, strict=True)
            if batch not in claimed and now_s - int(stamp or 0) > patience_s
        ]

    def _publish(self, run: Run, batches: Sequence[str], controlled: Control) -> None:
        publish(self._app, self._client, run, model_of(run), batches, retry=True, controlled=controlled)


def model_of(run: Run) -> str:
    """The model that a run asks for: it names the queue."""
    return str(run.info.content["target.model"])


def _given_up(run: Run, claim: Lapsed, prompt: Prompt) -> Sample:
    """Of a conversation up to the turn that was asked last. Raises RunError, as a worker would for its settings."""
    every_turn = asks_every_turn(run)
    asked = (_begun(run, claim.name, prompt) or next_turn(prompt)) if every_turn else prompt
    return Sample(
        run_id=run.run_id,
        run=run.name,
        batch=claim.name,
        row_key=prompt.row_key,
        prompt_id=prompt.prompt_id,
        split=prompt.split,
        messages=asked.messages,
        tools=prompt.tools,
        outcome="failed",
        error=f"the worker ended {claim.attempts} times while this row was the only one of its batch",
        error_kind="worker",
        model=model_of(run),
        attempt=claim.attempts,
        started_at=time.time(),
        sample=prompt.sample,
        drawn=drawing.drawn(drawing.asked(run), prompt.row_key)[1] or None,
        turns=asked.turns,
        ended=ended(FAILED, prompt, len(asked.turns)) if every_turn else None,
        source=prompt.source,
    )


def _begun(run: Run, batch: str, prompt: Prompt) -> Sample | None:
    """What the holders of a conversation finished of it. A single row finds itself in its parent's rows."""
    names = {batch, parent_of(batch)[0]}
    found = (sample for name in run.partials() for sample in run.read_partial(name) if sample.batch in names)
    return best(sample for sample in found if sample.row_key == prompt.row_key).get(prompt.row_key)
