"""The trainer's worker process: it takes trainings from the queue, one at a time, until it is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import redis
from celery.apps.worker import Worker
from celery.worker import state as celery_state
from kombu.exceptions import OperationalError

from draftfleet.errors import DraftfleetError, QueueError
from draftfleet.logs import event
from draftfleet.queue import TRAIN_QUEUE, connect, make_app
from draftfleet.reconcile import Reconciler
from draftfleet.settings import Settings
from draftfleet.storage import open_storage, probe
from trainer.tasks import REDIS_AGAIN_S, Node, register

log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Train what is asked for until SIGTERM or SIGINT; the training at hand is checkpointed and put back.

    Returns the exit code. Raises QueueError if no Redis is configured, StorageError if the storage is unfit.
    """
    app = make_app(settings)
    storage = open_storage(settings.storage.url)
    probe(storage)
    stop = threading.Event()
    with _signals(stop):
        client = _connect(settings, stop)
        if client is None:
            return 0
        host = socket.gethostname()
        node = Node(settings, app, client, storage, f"trainer-{os.getpid()}@{host}", stop)
        register(node)
        worker = _Worker(
            app=app,
            hostname=node.owner,
            pool="threads",
            concurrency=1,
            queues=[TRAIN_QUEUE],
            task_events=True,
            without_gossip=True,
            without_mingle=True,
        )
        sweeper = threading.Thread(target=_sweep, args=(node,), name="sweep", daemon=True)
        sweeper.start()
        log.info(event("trainer started", process=node.owner, storage=storage.url))
        worker.start()
        stop.set()
        sweeper.join()
        log.info(event("trainer ended", process=node.owner))
        return int(worker.exitcode or 0)


class _Worker(Worker):
    """Celery's worker program without its banner, with logs and signals left to us."""

    def install_platform_tweaks(self, worker: object) -> None:
        pass

    def emit_banner(self) -> None:
        pass

    def setup_logging(self, colorize: bool | None = None) -> bool:
        return True


@contextmanager
def _signals(stop: threading.Event) -> Generator[None]:
    """SIGTERM and SIGINT end the consumer and, through `stop`, the training at hand."""

    def told(number: int, frame: FrameType | None) -> None:
        stop.set()
        celery_state.should_stop = 0

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        celery_state.should_stop = None
        for number, handler in before.items():
            signal.signal(number, handler)


def _connect(settings: Settings, stop: threading.Event) -> redis.Redis | None:
    """A client that answered; None if told to stop before."""
    said = ""
    while True:
        try:
            return connect(settings)
        except QueueError as error:
            if said != (said := str(error)):
                log.warning(event("waiting for redis", error=error))
            if stop.wait(REDIS_AGAIN_S):
                return None


def _sweep(node: Node) -> None:
    """Have what dead holders left asked for again, trainings among it."""
    reconciler = Reconciler(node.app, node.client, node.storage, node.settings.claims)
    fault = ""
    while not node.stop.wait(node.settings.claims.sweep_s):
        try:
            reconciler.discover()
            reconciler.sweep()
            fault = ""
        except (redis.RedisError, OperationalError, DraftfleetError, OSError) as error:
            if fault != (fault := str(error)):  # an outage is said once, not at each look
                log.warning(event("sweep failed", error=error))
