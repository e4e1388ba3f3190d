"""Chores: what they say of a Redis that is away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import redis

from workers.loop import Chore


def test_a_chore_says_that_redis_is_back_only_once_it_has_spoken_to_it(
    caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    caplog.set_level(logging.INFO)
    answers: list[bool | Exception] = [redis.ConnectionError("refused"), False, redis.ConnectionError("refused"), True]

    def action() -> bool:
        answer = answers.pop(0) if answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    chore = Chore("renew", 0.01, action)
    chore.start()
    until(lambda: "redis reached again" in caplog.text, what="the end of the outage")
    left = list(answers)
    chore.stop()

    assert left == []
    assert caplog.text.count("redis out of reach") == 1
