"""The trainer's worker process: it takes trainings from the queue, one at a time, until it is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import redis
from celery.worker import state as celery_state
from kombu.exceptions import OperationalError

from draftfleet.errors import DraftfleetError
from draftfleet.health import Pulse
from draftfleet.logs import event
from draftfleet.metrics import served
from draftfleet.program import program, wait_for_redis
from draftfleet.queue import VERSIONS, make_app, train_queue
from draftfleet.reconcile import Reconciler
from draftfleet.settings import Settings
from draftfleet.storage import open_storage, probe
from trainer.scrape import TrainingCollector
from trainer.tasks import Node, register

log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Train what is asked for until SIGTERM or SIGINT; the training at hand is checkpointed and put back.

    Returns the exit code. Raises QueueRefused if Redis refuses the login, StorageError if the storage is unfit.
    """
    app = make_app(settings)
    storage = open_storage(settings.storage)
    probe(storage)
    stop = threading.Event()
    with _signals(stop), Pulse("trainer") as pulse:
        client = wait_for_redis(settings, stop)
        if client is None:
            return 0
        host = socket.gethostname()
        shown = TrainingCollector(host)
        pulse.state = lambda: str(shown)
        node = Node(settings, app, client, storage, f"trainer-{os.getpid()}@{host}", stop, shown, pulse)
        register(node)
        queues = [train_queue(version) for version in VERSIONS]
        worker = program(app, node.owner, queues, concurrency=1, on_turn=lambda: pulse.turned("queue"))
        sweeper = threading.Thread(target=_sweep, args=(node,), name="sweep", daemon=True)
        sweeper.start()
        log.info(event("trainer started", process=node.owner, storage=storage.url))
        with served(settings.trainer.metrics_address, settings.trainer.metrics_port, shown):
            worker.start()
        stop.set()
        sweeper.join()
        log.info(event("trainer ended", process=node.owner))
        return int(worker.exitcode or 0)


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


def _sweep(node: Node) -> None:
    """Have what dead holders left asked for again, trainings among it."""
    reconciler = Reconciler(node.app, node.client, node.storage, node.settings.claims)
    fault, due = "", 0.0
    while not node.stop.wait(node.settings.claims.sweep_s):
        try:
            node.shown.look()
            reconciler.discover()
            reconciler.sweep()
            if time.monotonic() >= due:
                reconciler.ask_for_trainings()
                due = time.monotonic() + node.settings.claims.reconcile_s
            fault = ""
        except (redis.RedisError, OperationalError, DraftfleetError, OSError) as error:
            node.pulse.excuse("queue")  # Celery's loop stands still while Redis is away
            if fault != (fault := str(error)):  # an outage is said once, not at each look
                log.warning(event("sweep failed", error=error))
