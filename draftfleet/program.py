"""The Celery worker program as the roles run it, and the wait for Redis before it starts."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import redis
from celery import Celery, bootsteps
from celery.apps.worker import Worker
from celery.exceptions import SecurityWarning
from redis.backoff import NoBackoff
from redis.retry import Retry

from draftfleet.errors import QueueError, QueueRefused
from draftfleet.logs import event
from draftfleet.queue import connect
from draftfleet.settings import Settings

log = logging.getLogger(__name__)

TURN_S = 1.0
"""How often Celery's loop tells that it turns."""

REDIS_AGAIN_S = 1.0
SAY_AGAIN_S = 30.0


class Program(Worker):
    """Celery's worker without its banner, with logs and signals left to us. Tasks run in threads."""

    def install_platform_tweaks(self, worker: object) -> None:
        pass

    def emit_banner(self) -> None:
        pass

    def setup_logging(self, colorize: bool | None = None) -> bool:
        return True


def program(
    app: Celery,
    name: str,
    queues: Sequence[str],
    concurrency: int,
    on_turn: Callable[[], object] = lambda: None,
) -> Program:
    """A program that is ready to `start()`, for these queues and that many tasks at once.

    `on_turn` is called every second from Celery's own loop, which stands still while it waits for Redis.
    """

    class Turns(bootsteps.StartStopStep):
        def register_with_event_loop(self, parent: Any, hub: Any) -> None:
            hub.timer.call_repeatedly(TURN_S, on_turn)

    cast(dict[str, set[type]], app.steps)["consumer"].add(Turns)
    # Celery's warning of a superuser is about pickled messages. Ours are JSON, and nothing else is accepted.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    return Program(
        app=app,
        hostname=name,
        pool="threads",
        concurrency=concurrency,
        queues=list(queues),
        task_events=True,
        without_gossip=True,
        without_mingle=True,
    )


def wait_for_redis(settings: Settings, stop: threading.Event) -> redis.Redis | None:
    """A client that answered; None if told to stop before. Its commands fail fast, since who uses it tries again.

    Raises QueueRefused if it refuses the login: a wrong password stays wrong.
    """
    num_tries = 0
    while True:
        try:
            client = connect(settings)
        except QueueRefused:
            raise
        except QueueError as error:
            if num_tries % (SAY_AGAIN_S / REDIS_AGAIN_S) == 0:
                log.warning(event("waiting for redis", error=error))
            num_tries += 1
            if stop.wait(REDIS_AGAIN_S):
                return None
        else:
            client.set_retry(Retry(NoBackoff(), 1))
            return client
