"""Waiting for Redis: patient where waiting helps, and only there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from draftfleet.embedded import Embedded
from draftfleet.errors import QueueRefused
from draftfleet.program import wait_for_redis
from draftfleet.settings import load


def test_a_redis_that_comes_later_is_waited_for(redis_server: Embedded) -> None:
    settings = load(flags={"queue.url": redis_server.url})
    redis_server.stop()

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait_for_redis, settings, threading.Event())
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        redis_server.start()
        client = waiting.result(timeout=60)

    assert client is not None
    assert client.ping()


def test_who_is_told_to_stop_waits_no_longer() -> None:
    stop = threading.Event()
    stop.set()

    assert wait_for_redis(load(flags={"queue.url": "redis://127.0.0.1:1/0"}), stop) is None


def test_a_wrong_password_is_not_waited_for(redis_server: Embedded) -> None:
    wrong = redis_server.url.replace("redis://:", "redis://:x")

    with pytest.raises(QueueRefused, match=r"refused the login.*Check queue\.url"):
        wait_for_redis(load(flags={"queue.url": wrong}), threading.Event())
