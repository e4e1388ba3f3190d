"""Publishing: references only, small, begun batches first."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import redis

from draftfleet.embedded import Embedded
from draftfleet.errors import QueueError, SettingsError
from draftfleet.names import batch_id
from draftfleet.queue import connect, generate_queue, keys, make_app, publish, publish_training, queued, retry_queue
from draftfleet.runs import Run
from draftfleet.settings import Settings, load

MODEL = "tiny"
NORMAL = keys(generate_queue(MODEL))[1]


@pytest.fixture
def client(settings: Settings) -> redis.Redis:
    return connect(settings)


def test_a_message_is_a_small_reference(settings: Settings, client: redis.Redis, run: Run) -> None:
    assert publish(make_app(settings), client, run, MODEL, [batch_id("train", 7)]) == 1

    [raw] = client.lrange(NORMAL, 0, -1)
    body = base64.b64decode(json.loads(raw)["body"])
    assert json.loads(body)[0] == [{"v": 1, "run_id": run.run_id, "run": "run", "batch": "train-000007"}]
    assert len(raw) < 1500


def test_a_group_larger_than_one_round_trip_arrives_whole_and_in_order(
    settings: Settings, client: redis.Redis, run: Run
) -> None:
    batches = [batch_id("train", number) for number in range(1201)]

    assert publish(make_app(settings), client, run, MODEL, iter(batches)) == 1201

    shown = [json.loads(raw)["headers"]["argsrepr"] for raw in client.lrange(NORMAL, 0, -1)]
    assert [text.split()[1] for text in reversed(shown)] == batches
    assert client.hlen(f"draftfleet:{run.run_id}:published") == 1201


@pytest.mark.parametrize("has_published", [True, False])
def test_a_redis_that_went_away_is_one_kind_of_error_however_it_is_met(
    settings: Settings, redis_server: Embedded, client: redis.Redis, run: Run, has_published: bool
) -> None:
    app = make_app(settings)
    if has_published:
        publish(app, client, run, MODEL, [batch_id("train", 0)])
    redis_server.stop()

    with pytest.raises(QueueError, match="may not be queued"):
        publish(app, client, run, MODEL, [batch_id("train", number) for number in range(3)])
    with pytest.raises(QueueError, match="may not be queued"):
        publish_training(app, client, run, "drafter")


@pytest.mark.parametrize("url", ["localhost:6379", "http://:secret-word@host:1/0", "redis://:secret-word/@host:6379/0"])
def test_an_address_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(SettingsError, match="redis://user:password@host:6379/0") as error:
        connect(load(flags={"queue.url": url}))

    assert "secret-word" not in str(error.value)


def test_batches_that_somebody_began_are_consumed_first(settings: Settings, client: redis.Redis, run: Run) -> None:
    app = make_app(settings)
    publish(app, client, run, MODEL, [batch_id("train", number) for number in range(3)])
    publish(app, client, run, MODEL, [batch_id("train", 9)], retry=True)
    assert queued(client, MODEL) == 4

    arrived: list[str] = []

    def note(body: Any, message: Any) -> None:
        arrived.append(body[0][0]["batch"])
        message.ack()

    with app.connection_for_read() as connection:
        queues = [app.amqp.queues.select_add(name) for name in (generate_queue(MODEL), retry_queue(MODEL))]
        consumer = app.amqp.TaskConsumer(connection.channel(), queues=queues)
        consumer.callbacks = [note]
        with consumer:
            consumer.qos(prefetch_count=1)
            while len(arrived) < 4:
                connection.drain_events(timeout=10)

    assert arrived[0] == batch_id("train", 9)
