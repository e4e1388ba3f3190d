"""What becomes of a batch that is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from draftfleet import control
from draftfleet.claims import Claims
from draftfleet.control import Control
from draftfleet.queue import connect, make_app, queued
from draftfleet.runs import Run
from draftfleet.settings import Sampling, Settings
from workers import tasks
from workers.batch import Batch, Content
from workers.tally import Tally

BATCH = "train-000000"


class Deaf(Claims):
    """Releases, and the answer is lost on its way."""

    def release(self, name: str, token: str) -> bool:
        super().release(name, token)
        raise redis.ConnectionError("gone")


def a_node(settings: Settings, run: Run) -> Any:
    return SimpleNamespace(
        app=make_app(settings),
        redis=connect(settings),
        model="tiny",
        holdings=SimpleNamespace(drop=lambda key: None),
        withdraw=lambda batch: None,
        tally=Tally(),
        orders=SimpleNamespace(of=control.read),
    )


@pytest.mark.parametrize("kind", [Claims, Deaf])
def test_a_batch_is_published_again_also_where_the_answer_to_its_release_was_lost(
    settings: Settings, run: Run, kind: type[Claims]
) -> None:
    node = a_node(settings, run)
    claims = kind(node.redis, run.run_id, settings.claims, "us")
    token = claims.take(BATCH).token  # type: ignore[union-attr]
    batch = Batch(BATCH, run, Content("tiny", Sampling()), claims, token, attempt=1, task_id="id")

    tasks._give_back(node, batch)

    assert queued(node.redis, "tiny") == 1
    assert claims.held() == set()


def test_a_batch_that_another_process_has_by_now_is_left_to_it(settings: Settings, run: Run) -> None:
    node = a_node(settings, run)
    claims = Claims(node.redis, run.run_id, settings.claims, "other")
    claims.take(BATCH)
    batch = Batch(BATCH, run, Content("tiny", Sampling()), claims, "our old token", attempt=1, task_id="id")

    tasks._give_back(node, batch)

    assert queued(node.redis, "tiny") == 0
    assert claims.holder(BATCH) == "other"


def test_a_message_that_came_by_a_priority_that_the_run_had_before_goes_back_under_the_present_one(
    settings: Settings, run: Run
) -> None:
    node = a_node(settings, run)
    node.orders = SimpleNamespace(of=lambda run: Control(priority="low"))

    assert not tasks._is_its_turn(node, run, BATCH, {"priority": 0, "routing_key": "generate.tiny"})
    assert node.redis.llen("generate.tiny\x06\x166") == 1
    assert not tasks._is_its_turn(node, run, BATCH, {"priority": 3, "routing_key": "generate-again.tiny"})
    assert node.redis.llen("generate-again.tiny\x06\x166") == 1
    assert tasks._is_its_turn(node, run, BATCH, {"priority": 6, "routing_key": "generate.tiny"})
