"""What becomes of a message, and of a batch that is not finished here."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from draftfleet import control
from draftfleet.claims import Claims
from draftfleet.control import Control
from draftfleet.errors import StorageError
from draftfleet.queue import STEPS, connect, keys, make_app, queued
from draftfleet.records import SCHEMA_VERSION
from draftfleet.runs import Run
from draftfleet.settings import Sampling, Settings
from draftfleet.wire import BatchMessage
from workers import tasks
from workers.batch import Batch, Content
from workers.suspects import Suspects
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


def test_a_run_that_was_cancelled_while_a_row_waited_for_its_turn_is_not_asked(
    settings: Settings, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[str] = []

    @contextmanager
    def turn(batch: str) -> Generator[bool]:
        control.change(run, None, state="cancelled")
        yield True

    monkeypatch.setattr(tasks, "_claim", lambda node, found, batch, task_id: claimed.append(batch))
    node = a_node(settings, run)
    node.state = "working"
    node.find = lambda message: SimpleNamespace(run=run)
    node.suspects = SimpleNamespace(turn=turn)
    node.holdings = SimpleNamespace(reserve=lambda key: True, free=lambda key: None)
    message = BatchMessage(v=SCHEMA_VERSION, run_id=run.run_id, run=run.name, batch=f"{BATCH}.0001")

    tasks.generate(node, message.model_dump(), "id", {"priority": STEPS["normal"]})

    assert claimed == []


def test_a_batch_whose_task_raises_leaves_no_rows_in_the_pool(
    settings: Settings, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdrawn: list[str] = []

    def raises(*_: object) -> bool:
        raise StorageError("a path that no waiting mends")

    monkeypatch.setattr(tasks, "_open", raises)
    node = a_node(settings, run)
    node.holdings = SimpleNamespace(hold=lambda batch, partials: None)
    node.withdraw = lambda batch: withdrawn.append(batch.name)
    claims = Claims(node.redis, run.run_id, settings.claims, "us")
    found = SimpleNamespace(run=run, content=Content("tiny", Sampling()), claims=claims, partials=None)

    with pytest.raises(StorageError):
        tasks._claim(node, found, BATCH, "id")  # type: ignore[arg-type]

    assert withdrawn == [BATCH]
    assert claims.holder(BATCH) == "us"  # it lapses: that it raised is an attempt


def test_a_row_that_waited_too_long_for_its_turn_goes_to_the_end_of_the_queue(
    settings: Settings, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.suspects.TURN_S", 0.05)
    node = a_node(settings, run)
    node.state, node.draining = "working", threading.Event()
    node.find = lambda message: SimpleNamespace(run=run)
    node.suspects = Suspects(node.draining)
    node.holdings = SimpleNamespace(reserve=lambda key: True, free=lambda key: None)
    message = BatchMessage(v=SCHEMA_VERSION, run_id=run.run_id, run=run.name, batch=f"{BATCH}.0001")

    with node.suspects.turn(f"{BATCH}.0000") as is_first:
        tasks.generate(node, message.model_dump(), "id", {"priority": STEPS["normal"]})

    assert is_first
    assert node.suspects.num_waiting == 0
    assert [sum(node.redis.llen(key) for key in keys(name)) for name in ("generate.tiny", "generate-again.tiny")] == [
        1,
        0,
    ]
