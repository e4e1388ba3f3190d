"""The task `draftfleet.generate`: one batch, from its message to its shard.

A message is a hint, so every step may meet the traces of another delivery of it. The claim comes first, then the look
for the shard: the other way round, a batch could be committed and released in between, and be done twice.

Flower shows how each delivery ended: as a failure where no row of the batch was answered, else as a success with the
words that are returned here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
from celery import Celery, Task
from celery.exceptions import Ignore
from kombu.exceptions import OperationalError

from draftfleet.claims import Held, Taken, new_token
from draftfleet.errors import CorruptFile, NewerFile, NewerMessage, QueueError, RunNewer
from draftfleet.letters import note_unreadable
from draftfleet.logs import event
from draftfleet.names import parent_of
from draftfleet.outcomes import Counts
from draftfleet.queue import GENERATE, STEPS, forget_published, generate_queue, leave_to_newer, publish, retry_queue
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.wire import BatchMessage
from workers.batch import Batch
from workers.guard import PAUSING
from workers.node import Node, OpenRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a delivery ended, for Flower. It names kinds of errors and not their texts, which may quote a prompt."""

    text: str
    is_failure: bool = False


def register(app: Celery, node: Node) -> None:
    """Let the app do this task with this node."""

    @app.task(name=GENERATE, bind=True, ignore_result=True)
    def generate_batch(self: Task, body: object) -> str:  # pyright: ignore[reportUnusedFunction]
        ended = generate(node, body, str(self.request.id), self.request.delivery_info or {})
        if not ended.is_failure:
            return ended.text
        # The batch has its shard: nothing was raised that belongs in the log, so the event is sent and not the error.
        try:
            self.send_event("task-failed", exception=ended.text, traceback="")
        except (redis.RedisError, OperationalError, OSError) as error:
            log.debug(event("failure not reported", error=str(error)))
        raise Ignore


def generate(node: Node, body: object, task_id: str, delivery: Mapping[str, Any]) -> Ended:
    """Do a batch, unless it is done, or another has it. Returns when nothing of it is left to this process."""
    meant = _meant(node, body, delivery)
    if isinstance(meant, Ended):
        return meant
    message, found = meant
    if not _is_its_turn(node, found.run, message.batch, delivery):
        return Ended("dropped: its run is stopped, or has another priority")
    if node.state != "working":  # the message was on its way when the gate closed
        _publish_again(node, found.run, message.batch)
        return Ended(f"put back: the worker is {node.state}")
    key = message.run_id, message.batch
    if not node.holdings.reserve(key):
        log.info(event("second delivery dropped", run=message.run, batch=message.batch, holder="this process"))
        return Ended("dropped: this worker has it already")
    try:
        with node.suspects.turn(message.batch) as is_our_turn:
            if not is_our_turn:
                _publish_again(node, found.run, message.batch, retry=node.draining.is_set())
            elif _is_its_turn(node, found.run, message.batch, delivery):  # once more: a single row may have waited long
                return _claim(node, found, message.batch, task_id)
    finally:
        node.holdings.free(key)
    return Ended("put back: it was not its turn")


def _meant(node: Node, body: object, delivery: Mapping[str, Any]) -> tuple[BatchMessage, OpenRun] | Ended:
    """The message and its run, or why this worker has nothing to do with it."""
    try:
        message = BatchMessage.parse(body)
    except NewerMessage as error:
        return _leave_to_newer(node, body, error, delivery)
    except QueueError as error:
        node.tally.dropped()
        log.error(event("message dropped", reason=str(error)))
        return Ended(f"dropped: {error}")
    try:
        found = node.find(message)
    except RunNewer as error:
        return _leave_to_newer(node, body, error, delivery)
    except PAUSING as error:  # the node was told to stop; the reconciler publishes it again
        log.error(event("message left", run=message.run, batch=message.batch, error=str(error)))
        return Ended("left: the worker was told to stop")
    return (message, found) if found else Ended("dropped: this worker has no such run of this model; its log says why")


def _leave_to_newer(node: Node, body: object, error: NewerMessage | RunNewer, delivery: Mapping[str, Any]) -> Ended:
    """No claim, so no attempt. If Redis fails, a newer worker's reconciler finds the batch missing."""
    node.left_to_newer(str(error))
    queue = generate_queue(node.model, error.version)
    try:
        leave_to_newer(node.app, queue, GENERATE, cast(dict[str, Any], body), delivery)
    except QueueError as fault:
        log.warning(event("message not left", queue=queue, error=str(fault)))
    return Ended(f"left to a newer worker, in {queue}")


def _is_its_turn(node: Node, run: Run, name: str, delivery: Mapping[str, Any]) -> bool:
    """Whether the run is to be worked on, and the message came by its present priority or a lower one.

    The message of a run that is paused is dropped: `resume` publishes what is outstanding. One that came by a priority
    that the run had before goes back under the present one.
    """
    controlled = node.orders.of(run)
    if not controlled.is_running:
        node.tally.dropped()
        log.debug(event("message dropped", run=run.name, batch=name, reason=f"the run is {controlled.state}"))
        try:
            forget_published(node.redis, run.run_id, [name])
        except redis.RedisError as error:
            log.debug(event("publication not forgotten", run=run.name, batch=name, error=str(error)))
        return False
    step = STEPS[controlled.priority]
    if int(delivery.get("priority") or 0) >= step:
        return True
    log.debug(event("message put back", run=run.name, batch=name, priority=controlled.priority))
    _publish_again(node, run, name, retry=delivery.get("routing_key") == retry_queue(node.model))
    return False


def _claim(node: Node, found: OpenRun, name: str, task_id: str) -> Ended:
    taken = _take(node, found, name)
    if taken is None:
        return Ended("left: Redis was away and the worker drains")
    if isinstance(taken, Held):
        log.info(event("second delivery dropped", run=found.run.name, batch=name, holder=taken.owner))
        return Ended(f"dropped: {taken.owner} has it")
    batch = Batch(name, found.run, found.content, found.claims, taken.token, taken.attempt, task_id)
    node.holdings.hold(batch, found.partials)
    try:
        if not _stands_alone(node, batch):
            return _give_back(node, batch)
        if reason := _open(node, found, batch):
            return Ended(reason)
        node.submit(batch)
        return _end(node, found, batch)
    except PAUSING as error:  # the node was told to stop while it waited for the storage
        log.error(event("batch given back", run=found.run.name, batch=name, error=str(error)))
        return _give_back(node, batch)
    except Exception:  # its claim lapses, and that is an attempt; but nobody would collect the rows in the pool
        batch.stop("raised")
        node.withdraw(batch)
        raise


def _take(node: Node, found: OpenRun, name: str) -> Taken | Held | None:
    """The claim; None if the node drains while Redis is away."""
    said, token = False, new_token()
    while True:
        try:
            return found.claims.take(name, token)
        except redis.RedisError as error:
            if not said:
                log.warning(event("waiting for redis", batch=name, error=str(error)))
            said = True
            if node.draining.wait(1.0):
                return None


def _stands_alone(node: Node, batch: Batch) -> bool:
    """A single row on its last attempt is asked when the node holds nothing else. False if the node drains.

    A row that is stopped meanwhile, as by a pause of its run, need not wait to be given back.
    """
    if parent_of(batch.name)[1] is None or batch.attempt < node.settings.claims.max_attempts:
        return True
    log.warning(event("row cornered", run=batch.run.name, batch=batch.name, attempt=batch.attempt))
    return node.suspects.corner(lambda: bool(batch.stopped) or node.holdings.all() == [batch])


def _open(node: Node, found: OpenRun, batch: Batch) -> str | None:
    """Read the prompts and the rows of earlier holders. Returns why there is nothing to do, if so."""
    run, name = found.run, batch.name
    if reason := node.guard.run("looking for a shard", lambda: _over(run, name)):
        log.info(event("batch skipped", run=run.name, batch=name, reason=reason))
        node.guard.run("deleting finished rows", lambda: found.partials.clean(name))
        _release(node, batch)
        return f"skipped: {reason}"
    try:
        prompts = node.guard.run("reading prompts", lambda: run.read_prompts(name))
    except NewerFile as error:
        node.left_to_newer(f"prompts of run {run.name}: {error}")
        _release(node, batch)
        return "left: its prompts are of a newer version"
    except (FileNotFoundError, CorruptFile) as error:
        # Not given back at once: the reconciler publishes it again later, perhaps after somebody has mended it.
        log.error(event("batch has no prompts", run=run.name, batch=name, error=str(error)))
        fault = error
        node.guard.run("noting a dead batch", lambda: note_unreadable(run, name, fault, worker=node.process))
        _release(node, batch)
        return f"no prompts: {type(error).__name__}"
    prompts = list({prompt.row_key: prompt for prompt in prompts}.values())
    keys = {prompt.row_key for prompt in prompts}
    earlier = node.guard.run("reading finished rows", lambda: found.partials.earlier(name, keys))
    batch.open(prompts, earlier)
    node.tally.taken(batch.attempt)
    log.info(
        event("batch taken", run=run.name, batch=name, attempt=batch.attempt, rows=len(prompts), found=len(earlier))
    )
    return None


def _over(run: Run, name: str) -> str | None:
    """Why nothing is left to do for a batch."""
    parent, row = parent_of(name)
    if run.is_done(name):
        return "done"
    if row is not None and run.is_done(parent):
        return "done as a whole"
    if run.is_dead(name):
        return "given up"
    return "split" if row is None and run.is_split(name) else None


def _end(node: Node, found: OpenRun, batch: Batch) -> Ended:
    """Wait for the rows; commit them, or leave the batch to others."""
    if batch.wait():
        return _commit(node, found, batch)
    if batch.stopped == "lost":
        node.withdraw(batch)
        node.tally.ended("left")
        log.warning(
            event("batch left to its new holder", run=batch.run.name, batch=batch.name, finished=len(batch.finished))
        )
        return Ended("left: another worker has claimed it meanwhile")
    return _give_back(node, batch)


def _commit(node: Node, found: OpenRun, batch: Batch) -> Ended:
    samples = batch.samples()
    was_first = node.guard.run("committing a batch", lambda: found.run.commit(batch.name, samples))
    counts = batch.counts()
    node.tally.ended("done" if was_first else "done by another")
    if not was_first:
        for sample in samples:
            node.tally.wasted(sample.server, "done twice", sample.completion_tokens)
    _release(node, batch)
    node.guard.run("deleting finished rows", lambda: found.partials.clean(batch.name))
    log.info(
        event(
            "batch done" if was_first else "batch was done by another",
            run=found.run.name,
            batch=batch.name,
            attempt=batch.attempt,
            rows=counts.rows,
            ok=counts.ok,
            truncated=counts.truncated,
            failed=counts.failed,
            tokens=counts.tokens,
            seconds=time.monotonic() - batch.taken_at,
        )
    )
    return _ended(found.run.name, counts, samples)


def _ended(run: str, counts: Counts, samples: Sequence[Sample]) -> Ended:
    """`16 rows: 14 ok, 2 failed (2 bad_request), 1,204 tokens; see draftfleet dead list --run demo`."""
    parts = {"ok": counts.ok, "truncated": counts.truncated, "failed": counts.failed}
    said = ", ".join(f"{number:,} {outcome}" for outcome, number in parts.items() if number)
    if not counts.failed:
        return Ended(f"{counts.rows:,} rows: {said}, {counts.tokens:,} tokens")
    kinds = Counter(sample.error_kind or "unknown" for sample in samples if sample.outcome == "failed")
    why = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
    text = f"{counts.rows:,} rows: {said} ({why}), {counts.tokens:,} tokens; see draftfleet dead list --run {run}"
    return Ended(text, is_failure=counts.failed == counts.rows)


def _give_back(node: Node, batch: Batch) -> Ended:
    """Let another worker go on with it: save, release, publish again. No attempt is counted."""
    batch.stop("given back")
    node.withdraw(batch)
    node.tally.ended("given back")
    if _release(node, batch) is not False:  # also where the answer was lost: who takes it finds out
        _publish_again(node, batch.run, batch.name)
    log.info(
        event(
            "batch given back",
            run=batch.run.name,
            batch=batch.name,
            finished=len(batch.finished),
            rows=len(batch.prompts),
        )
    )
    return Ended(f"given back with {len(batch.finished):,} of {len(batch.prompts):,} rows: another goes on with it")


def _release(node: Node, batch: Batch) -> bool | None:
    """False if it was not ours any more. None if Redis gave no answer: if it was not released, it lapses by itself."""
    node.holdings.drop(batch.key)
    try:
        return batch.claims.release(batch.name, batch.token)
    except redis.RedisError as error:
        log.warning(event("claim not released", batch=batch.name, error=str(error)))
        return None


def _publish_again(node: Node, run: Run, name: str, *, retry: bool = True) -> None:
    try:
        publish(node.app, node.redis, run, node.model, [name], retry=retry, controlled=node.orders.of(run))
    except QueueError as error:
        log.warning(event("batch not published again", run=run.name, batch=name, error=str(error)))
