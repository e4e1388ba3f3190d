"""`draftfleet status`: what it says of a run, and that its repair brings a damaged run to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from draftfleet.embedded import Embedded
from draftfleet.names import batch_id
from draftfleet.queue import connect, keys, make_app, publish, retry_queue
from draftfleet.reconcile import Reconciler
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import drafters, show

MODEL = "tiny"
DONE, WAITING = batch_id("train", 0), batch_id("train", 1)

Show = Callable[..., dict[str, Any]]


@pytest.fixture
def client(settings: Settings) -> redis.Redis:
    return connect(settings)


@pytest.fixture
def half_done(
    settings: Settings,
    client: redis.Redis,
    run: Run,
    make_prompts: Callable[..., list[Prompt]],
    make_sample: Callable[..., Sample],
) -> Run:
    """One batch of three rows is done, one of two waits."""
    run.write_prompts(DONE, make_prompts(3))
    run.write_prompts(WAITING, make_prompts(2, start=3))
    run.seal({"prompts": 5})
    publish(make_app(settings), client, run, MODEL, [DONE, WAITING])
    run.commit(DONE, [make_sample(prompt) for prompt in run.read_prompts(DONE)])
    return run


@pytest.fixture
def shown(settings: Settings, capsys: pytest.CaptureFixture[str]) -> Show:
    """What `status --json` says, with its exit code."""

    def call(*, repair: bool = False) -> dict[str, Any]:
        code = show(settings, watch=False, as_json=True, repair=repair)
        return {"code": code, **json.loads(capsys.readouterr().out)}

    return call


def damage(run: Run, batch: str) -> None:
    path = run.storage.local(f"{run.name}/samples/{batch}.parquet")
    path.write_bytes(path.read_bytes()[:100])


def test_the_rows_add_up_and_the_queue_is_told(half_done: Run, shown: Show) -> None:
    state = shown()

    assert (state["code"], state["expected"], state["ok"], state["pending"]) == (0, 5, 3, 2)
    assert state["identity_holds"]
    assert state["queue"] == {"waiting": 2, "error": None}


def test_a_redis_that_is_away_is_part_of_the_state(half_done: Run, shown: Show, redis_server: Embedded) -> None:
    redis_server.stop()

    state = shown()

    assert (state["code"], state["ok"]) == (0, 3)
    assert "does not answer" in state["queue"]["error"]


def test_a_person_is_told_what_to_do(
    half_done: Run, settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    damage(half_done, DONE)

    assert show(settings, watch=False, as_json=False, repair=False) == 1

    said = capsys.readouterr().out
    assert f"1 shards cannot be read ({DONE}): run `draftfleet verify --repair`." in said
    assert "start `draftfleet work" in said


def test_a_corrupt_shard_is_named_and_repaired_at_once_though_its_batch_was_published_lately(
    half_done: Run, shown: Show, client: redis.Redis
) -> None:
    damage(half_done, DONE)
    before = shown()
    assert (before["code"], before["batches"]["corrupt"], before["pending"]) == (1, [DONE], 5)

    after = shown(repair=True)

    assert (after["code"], after["batches"]["corrupt"], after["pending"]) == (0, [], 5)
    assert after["identity_holds"]
    assert sum(client.llen(key) for key in keys(retry_queue(MODEL))) == 1


def test_a_worker_that_took_the_run_for_finished_looks_after_it_again_once_it_is_repaired(
    half_done: Run, settings: Settings, client: redis.Redis, shown: Show, make_sample: Callable[..., Sample]
) -> None:
    half_done.commit(WAITING, [make_sample(prompt, WAITING) for prompt in half_done.read_prompts(WAITING)])
    reconciler = Reconciler(make_app(settings), client, half_done.storage, settings.claims)
    assert reconciler.republish() == 0

    damage(half_done, DONE)
    shown(repair=True)
    client.flushall()

    assert reconciler.republish() == 1


def test_a_training_that_was_asked_for_and_has_not_begun_is_shown(run: Run) -> None:
    folder = run.drafter_dir("eagle3")
    folder.mkdir(parents=True)
    (folder / "drafter-settings.json").write_text('{"trainer": {"max_steps": 60}, "target": {}}')

    [(name, progress)] = drafters(run).items()

    assert (name, progress["step"], progress["max_steps"], progress["finished"]) == ("eagle3", 0, 60, False)
