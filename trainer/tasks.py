"""`draftfleet train` asks for a drafter; the trainer's Celery task has it trained under a claim, by a child process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import redis
from celery import Celery, Task
from kombu.exceptions import OperationalError

from draftfleet.claims import Claims, Held, Taken
from draftfleet.errors import CorruptFile, NewerMessage, QueueError, RunMissing, RunNewer, TrainingError
from draftfleet.health import Pulse
from draftfleet.logs import event
from draftfleet.queue import TRAIN, connect, leave_to_newer, make_app, note_ended, publish_training, train_queue
from draftfleet.reconcile import TRAIN_CLAIM
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import Storage, open_storage
from draftfleet.wire import TrainMessage
from trainer.child import TRAINING, check_measuring, check_processes, supervise
from trainer.claim import Claim
from trainer.pinned import pin, with_pinned
from trainer.progress import Progress
from trainer.scrape import TrainingCollector

log = logging.getLogger(__name__)

REDIS_AGAIN_S = 1.0


def enqueue(settings: Settings) -> str:
    """Pin what the drafter is trained with and ask a trainer for it. Returns a sentence that says so.

    A drafter that was begun goes on from its latest checkpoint; for one that is finished nobody is asked. Raises
    SettingsError, RunMissing, RunConflict or QueueError.
    """
    check_processes(settings.trainer.processes, settings.trainer.accumulation)
    check_measuring(settings.trainer)
    run = Run.open(open_storage(settings.storage), settings.run)
    drafter = settings.trainer.drafter
    progress = Progress.read(run, drafter)
    if progress is not None and progress.finished:
        pin(run, settings)  # refuses other settings
        return (
            f"drafter {drafter} of run {run.name} is finished: {progress}. To train it further, begin another one with "
            f"{settings.trainer.algorithm}.start_from = run:{run.name}/{drafter}; to train it anew, delete "
            f"{run.drafter_dir(drafter)}."
        )
    client = connect(settings)  # before anything is pinned
    pin(run, settings)
    with make_app(settings) as app:
        publish_training(app, client, run, drafter)
    client.close()
    log.info(event("training asked for", run=run.name, drafter=drafter))
    return f"training of drafter {drafter} of run {run.name} is in the queue; it goes to {run.drafter_dir(drafter)}."


@dataclass(frozen=True)
class Node:
    """What a trainer's process works with. `stop` is set when it is asked to end."""

    settings: Settings
    app: Celery
    client: redis.Redis
    storage: Storage
    owner: str
    stop: threading.Event
    shown: TrainingCollector
    pulse: Pulse


def register(node: Node) -> None:
    """Put the task on the node's app."""

    def train(task: Task[Any, Any], body: object) -> str:
        def report(text: str) -> None:
            try:
                task.send_event("task-progress", result=text)
            except (redis.RedisError, OperationalError, OSError) as error:
                log.debug(event("progress not reported", error=error))

        return train_drafter(node, body, report)

    node.app.task(name=TRAIN, bind=True)(train)


def train_drafter(node: Node, body: object, report: Callable[[str], object]) -> str:
    """Train the drafter that a message names. Returns how it ended, for Flower.

    A message that is not for this storage, or whose drafter another trainer is at work on, is dropped. Raises
    TrainingError if the training fails; the next `draftfleet train` goes on from its latest checkpoint.
    """
    try:
        message = TrainMessage.parse(body)
        run = Run.open(node.storage, message.run)
        if run.run_id != message.run_id:
            raise RunMissing(f"run {message.run} in {node.storage.url} is another run of that name: {run.run_id}.")
        settings = with_pinned(run, message.drafter, node.settings)
    except (NewerMessage, RunNewer) as error:
        return _leave_to_newer(node, body, error)
    except (QueueError, RunMissing, CorruptFile) as error:
        log.error(event("message dropped", error=error))
        return f"dropped: {error}"
    claims = Claims(node.client, run.run_id, node.settings.claims, node.owner)
    name = TRAIN_CLAIM + message.drafter
    taken = _take(node, claims, name)
    if taken is None:
        return "stopped before Redis was back; the message goes back by itself"
    if isinstance(taken, Held):
        log.info(event("message dropped", run=run.name, drafter=message.drafter, at_work=taken.owner))
        return f"dropped: {taken.owner} is at work on it"
    node.shown.show(run, message.drafter)
    claim = Claim(claims, name, taken.token, node.settings.claims.renew_s)
    try:
        return supervise(run, settings, claim, stop=node.stop, report=report, pulse=node.pulse)
    except TrainingError as error:
        if not claim.is_lost:
            Progress.fail(run, message.drafter, settings.trainer.max_steps, str(error))
        raise
    finally:
        node.pulse.over(TRAINING)
        _give_back(node, run, claim, message.drafter)


def _leave_to_newer(node: Node, body: object, error: NewerMessage | RunNewer) -> str:
    """It waits where only newer trainers listen. If Redis fails, a newer reconciler asks for the training again."""
    queue = train_queue(error.version)
    log.warning(event("message left to newer trainers", queue=queue, reason=error))
    try:
        leave_to_newer(node.app, queue, TRAIN, cast(dict[str, Any], body), {})
    except QueueError as fault:
        log.warning(event("message not left", queue=queue, error=fault))
    return f"left to a newer trainer, in {queue}"


def _take(node: Node, claims: Claims, name: str) -> Taken | Held | None:
    """Redis may be away for a moment: wait for it. None if asked to stop before it is back."""
    while True:
        try:
            return claims.take(name)
        except redis.RedisError as error:
            log.warning(event("waiting for redis", error=error))
            if node.stop.wait(REDIS_AGAIN_S):
                return None


def _give_back(node: Node, run: Run, claim: Claim, drafter: str) -> None:
    """Release the claim; a training that this process was asked to leave goes back into the queue for another."""
    try:
        released = claim.release()
        if node.stop.is_set() and released:
            publish_training(node.app, node.client, run, drafter)
            log.info(event("training put back", run=run.name, drafter=drafter))
        elif released:  # finished, or failed in a way that another try does not mend
            note_ended(node.client, run.run_id, drafter)
    except (redis.RedisError, QueueError) as error:
        # The claim lapses, and whoever sweeps it asks for the training again.
        log.warning(event("claim not released", run=run.name, drafter=drafter, error=error))
