"""Chores: what they say of what is away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import redis

from draftfleet.errors import StorageUnwritable
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


def test_a_chore_whose_storage_is_away_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    def action() -> None:
        raise StorageUnwritable("could not write /runs: read-only")

    chore = Chore("checkpoint", 0.01, action)
    chore.start()
    until(lambda: len(caplog.records) >= 2, what="a second turn")
    chore.stop()

    assert "could not write /runs" in caplog.text
    assert "Traceback" not in caplog.text
