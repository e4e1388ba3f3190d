"""The Celery app, the names on the wire, and publishing. A message is a hint: losing or doubling one costs nothing."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import redis
from celery import Celery
from kombu.exceptions import KombuError
from redis.backoff import NoBackoff
from redis.retry import Retry

from draftfleet import connection, control
from draftfleet.claims import published_key
from draftfleet.control import Control, Priority
from draftfleet.errors import QueueError
from draftfleet.garbage import DropGarbage
from draftfleet.records import SCHEMA_VERSION
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.wire import BatchMessage, TrainMessage

GENERATE = "draftfleet.generate"
TRAIN = "draftfleet.train"
TRAIN_QUEUE = "train"
VERSIONS = range(1, SCHEMA_VERSION + 1)
"""Of messages, as far as this draftfleet reads them."""

PUBLISH_BATCH = 500
"""Messages per round trip to Redis."""

STEPS: dict[Priority, int] = {"high": 0, "normal": 3, "low": 6}
"""Priorities as kombu's Redis transport counts them: 0 goes first, whatever it says for other brokers. Each has a list
of its own in Redis, `keys`; within one, what was begun goes first."""

SEP = "\x06\x16"
"""kombu's own, between a queue's name and a step; Flower looks for it too."""

TRAIN_FIELD = "train:"
"""In the hash of what was published: fields that begin so are drafters, the others are batches."""

ENDED = -1
"""Stands there for a drafter whose training ended by itself, well or not: it is not asked for again by itself."""


def generate_queue(model: str, version: int = SCHEMA_VERSION) -> str:
    """Where batches of this model wait. A worker listens for the models that its servers serve.

    Messages from version 2 on have a queue of their own, which older workers do not listen to.
    """
    return f"generate{_of(version)}.{model}"


def retry_queue(model: str, version: int = SCHEMA_VERSION) -> str:
    """Where batches wait that somebody has begun. Consumed first: `sorted` order puts `-` before `.`."""
    return f"generate-again{_of(version)}.{model}"


def train_queue(version: int = SCHEMA_VERSION) -> str:
    return f"{TRAIN_QUEUE}{_of(version)}"


def _of(version: int) -> str:
    return "" if version == 1 else f"@{version}"


def queues(model: str) -> list[str]:
    """All that a worker of this model listens to: those of older versions, too."""
    return [named(model, version) for version in VERSIONS for named in (retry_queue, generate_queue)]


def connect(settings: Settings, *, is_hasty: bool = False) -> redis.Redis:
    """A client that answered. Raises QueueError, QueueRefused where waiting does not help, or SettingsError.

    One that is hasty waits for 5 seconds at most and tries nothing twice.
    """
    url = connection.address(settings)
    client = redis.Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=5 if is_hasty else 30,
        socket_connect_timeout=5,
        socket_keepalive=True,
        **({"retry": Retry(NoBackoff(), 0)} if is_hasty else {}),
        **connection.tls(settings) or {},
    )
    try:
        client.ping()
        connection.refuse_cluster(client, url)
    except (redis.RedisError, OSError) as error:
        if refused := connection.refusal(error, settings):
            raise refused from None
        said = str(error).rstrip(".")
        raise QueueError(
            f"Redis at {connection.shown(url)} does not answer: {said}. Start it (`draftfleet up` starts the embedded "
            "one) or correct queue.url."
        ) from None
    return client


def make_app(settings: Settings) -> Celery:
    """The app of every process. Roles register their tasks on it under the names above."""
    app = Celery("draftfleet", broker=connection.address(settings))
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        broker_connection_max_retries=None,
        broker_connection_retry_on_startup=True,
        broker_use_ssl=connection.tls(settings),
        broker_transport_options={
            "visibility_timeout": 21_600,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "unacked_mutex_expire": 15,
            "queue_order_strategy": "sorted",
            "priority_steps": list(STEPS.values()),
            "sep": SEP,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 15,
        },
        task_acks_late=True,
        task_create_missing_queues=True,
        task_ignore_result=True,
        task_reject_on_worker_lost=True,
        task_send_sent_event=True,
        task_track_started=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_disable_prefetch=True,
        worker_hijack_root_logger=False,
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
    )
    cast(dict[str, set[type]], app.steps)["consumer"].add(DropGarbage)
    return app


def publish(
    app: Celery,
    client: redis.Redis,
    run: Run,
    model: str,
    batches: Iterable[str],
    *,
    retry: bool = False,
    controlled: Control | None = None,
) -> int:
    """Put a reference to each batch into the model's queue, or into the one consumed first. Returns how many.

    A run that is paused or cancelled gets none. `controlled` is what holds for the run; unset, it is read.
    If it raises QueueError, some of the last PUBLISH_BATCH may be queued: publish them all again.
    """
    controlled = controlled or control.read(run)
    if not controlled.is_running:
        return 0
    queue = retry_queue(model) if retry else generate_queue(model)
    published = 0
    for chunk in chunks(batches):
        with _faults_told():
            _publish_chunk(app, run, queue, chunk, STEPS[controlled.priority])
            note_published(client, run.run_id, chunk)
        published += len(chunk)
    return published


def chunks(batches: Iterable[str]) -> Iterator[list[str]]:
    """PUBLISH_BATCH at a time: Redis answers nobody else while it does one command."""
    remaining = iter(batches)
    while chunk := list(islice(remaining, PUBLISH_BATCH)):
        yield chunk


def _publish_chunk(app: Celery, run: Run, queue: str, batches: Sequence[str], step: int) -> None:
    with app.amqp.producer_pool.acquire(block=True) as producer, producer.batch(PUBLISH_BATCH):
        for batch in batches:
            message = BatchMessage(v=SCHEMA_VERSION, run_id=run.run_id, run=run.name, batch=batch)
            shown = f"{run.name} {batch}"
            _send(app, producer, task=GENERATE, queue=queue, body=message.model_dump(), shown=shown, step=step)


def publish_training(app: Celery, client: redis.Redis, run: Run, drafter: str) -> None:
    """Ask for a drafter to be trained. Asking twice is harmless: the task holds a claim. Raises QueueError."""
    message = TrainMessage(v=SCHEMA_VERSION, run_id=run.run_id, run=run.name, drafter=drafter)
    with _faults_told(), app.amqp.producer_pool.acquire(block=True) as producer:
        shown = f"{run.name} {drafter}"
        _send(app, producer, task=TRAIN, queue=train_queue(), body=message.model_dump(), shown=shown, step=0)
        note_published(client, run.run_id, [TRAIN_FIELD + drafter])


def leave_to_newer(app: Celery, queue: str, task: str, body: dict[str, Any], delivery: Mapping[str, Any]) -> None:
    """Put a message as it came into the queue of its version, which only newer processes listen to.

    Raises QueueError.
    """
    step = int(delivery.get("priority") or 0)
    with _faults_told(), app.amqp.producer_pool.acquire(block=True) as producer:
        _send(app, producer, task=task, queue=queue, body=body, shown="of a newer version", step=step)


def _send(app: Celery, producer: Any, *, task: str, queue: str, body: dict[str, Any], shown: str, step: int) -> None:
    app.send_task(
        task,
        args=[body],
        queue=queue,
        producer=producer,
        priority=step,
        argsrepr=shown,
        kwargsrepr="",
        ignore_result=True,
    )


@contextmanager
def _faults_told() -> Generator[None]:
    """Whatever Redis, kombu or the socket raise, as one error.

    A RuntimeError, too: where the connection breaks before a batch is full, kombu 5.7.0 goes on with a new channel and
    finds that it is another one.
    """
    try:
        yield
    except (redis.RedisError, KombuError, OSError, RuntimeError) as error:
        raise QueueError(f"Redis failed in publishing messages: {error}. They may not be queued.") from error


def note_published(client: redis.Redis, run_id: str, names: Sequence[str]) -> None:
    """Remember by Redis' clock when these batches, or drafters with TRAIN_FIELD before them, were last published."""
    now_s, _ = client.time()
    client.hset(published_key(run_id), mapping={name: int(now_s) for name in names})


def forget_published(client: redis.Redis, run_id: str, batches: Sequence[str]) -> None:
    """Their messages are gone: whoever compares storage and queue finds them missing at once."""
    client.hdel(published_key(run_id), *batches)


def note_ended(client: redis.Redis, run_id: str, drafter: str) -> None:
    """The drafter's training ended by itself: only a person asks for it again."""
    client.hset(published_key(run_id), TRAIN_FIELD + drafter, ENDED)


def keys(queue: str) -> list[str]:
    """The lists in Redis that make up a queue, the first to be consumed first."""
    return [f"{queue}{SEP}{step}" if step else queue for step in STEPS.values()]


def queued(client: redis.Redis, model: str) -> int:
    """Messages that wait for workers of this model."""
    pipeline = client.pipeline(transaction=False)
    for key in [key for queue in queues(model) for key in keys(queue)]:
        pipeline.llen(key)
    return sum(map(int, pipeline.execute()))
