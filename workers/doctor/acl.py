"""Whether a user of Redis may do what a worker does: it is done, on keys of our own that are removed again."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable

import redis
from redis.exceptions import NoPermissionError

_SCRIPT = "local t = redis.call('TIME'); local i = redis.pcall('INFO', 'server'); return redis.call('HLEN', KEYS[1])"


def refused(client: redis.Redis) -> list[str]:
    """The commands that this user may not do, each with the keys that it is about. May raise redis.RedisError."""
    name = f"doctor-{uuid.uuid4().hex}"
    report, queue, binding, held = f"draftfleet:{name}", f"generate.{name}", f"_kombu.binding.{name}", f"unacked{name}"
    again = f"generate-again.{name}"
    channel = f"/{client.connection_pool.connection_kwargs.get('db') or 0}"
    trials: dict[str, Callable[[], object]] = {
        "HSET draftfleet:*": lambda: client.hset(report, "at", "1"),
        "EVAL draftfleet:*": lambda: client.eval(_SCRIPT, 1, report),
        "SCAN": lambda: client.scan(count=1),
        "BRPOP generate.*": lambda: client.brpop([queue], timeout=0.1),
        "LPUSH generate.*": lambda: client.lpush(queue, ""),
        "RPUSH generate-again.*": lambda: client.rpush(again, ""),
        "SADD _kombu.*": lambda: client.sadd(binding, ""),
        "HSET unacked*": lambda: client.hset(held, "at", "1"),
        "PUBLISH celeryev": lambda: client.publish(f"{channel}.celeryev/{name}", "{}"),
        "SUBSCRIBE celery.pidbox": lambda: _subscribe(client, f"{channel}.celery.pidbox"),
    }
    found: list[str] = []
    try:
        for command, trial in trials.items():
            if "PUSH" in command and "BRPOP generate.*" in found:
                continue  # who may take nothing out of a queue leaves in it what it put there
            try:
                trial()
            except NoPermissionError:
                found.append(command)
    finally:
        for key in (report, queue, again, binding, held):
            with contextlib.suppress(redis.RedisError):  # what it may not make it may not delete, and is not there
                client.delete(key)
    return found


def _subscribe(client: redis.Redis, channel: str) -> None:
    with client.pubsub() as heard:
        heard.subscribe(channel)
        heard.get_message(timeout=1)
