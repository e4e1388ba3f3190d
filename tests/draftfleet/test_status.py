"""`draftfleet status`: what it says of a run, and that its repair brings a damaged run to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis
from rich.console import Console

from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.embedded import Embedded
from draftfleet.names import batch_id
from draftfleet.queue import connect, keys, make_app, note_ended, publish, publish_training, retry_queue
from draftfleet.reconcile import Reconciler
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import collect, drafters, render, show

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


@pytest.fixture
def asked_for(run: Run) -> Callable[..., None]:
    """A drafter that was asked for, with what its progress.json says."""

    def put(name: str, algorithm: str, **progress: Any) -> None:
        folder = run.drafter_dir(name)
        folder.mkdir(parents=True)
        pinned = {"trainer": {"max_steps": 60, "algorithm": algorithm}, "target": {}}
        (folder / "drafter-settings.json").write_text(json.dumps(pinned))
        if progress:
            known = {"max_steps": 60, "tokens": 9, "tokens_per_s": 1.0, "rows_admitted": 3, "finished": False}
            (folder / "progress.json").write_text(json.dumps({"loss": 2.5, **known, **progress}))

    return put


def test_each_drafter_is_shown_with_its_state_its_trainer_and_its_acceptance(
    run: Run, settings: Settings, client: redis.Redis, asked_for: Callable[..., None]
) -> None:
    asked_for("a-queued", "eagle3")
    asked_for("b-begun", "dflash")
    asked_for("c-training", "eagle3", step=20, acceptance_length=2.31, acceptance_step=20)
    asked_for("d-finished", "dflash", step=60, finished=True)
    asked_for("e-failed", "eagle3", step=7, error="training ended with exit code 3:\nerror: it is too warm.\nAll of it")
    best = {"checkpoint": "step-000010", "step": 10, "acceptance_length": 2.4}
    (run.drafter_dir("c-training") / "best.json").write_text(json.dumps(best))
    app = make_app(settings)
    for name in ("a-queued", "b-begun", "c-training"):
        publish_training(app, client, run, name)
    for name, owner in (("b-begun", "trainer-1@gpu1"), ("c-training", "trainer-2@gpu1")):
        Claims(client, run.run_id, settings.claims, owner).take(f"train:{name}")
    note_ended(client, run.run_id, "e-failed")

    state = collect(settings, Accountant(run))

    told = {name: (one["algorithm"], one["state"], one["trainer"]) for name, one in state["drafters"].items()}
    assert told == {
        "a-queued": ("eagle3", "queued", None),
        "b-begun": ("dflash", "begins", "trainer-1@gpu1"),
        "c-training": ("eagle3", "training", "trainer-2@gpu1"),
        "d-finished": ("dflash", "finished", None),
        "e-failed": ("eagle3", "failed", None),
    }
    console = Console(record=True, width=160)
    console.print(render(state))
    shown = console.export_text()
    assert "training on gpu1" in shown
    assert "2.31, best 2.40 at 10" in shown
    assert "drafter e-failed failed at step 7: it is too warm. `draftfleet train --drafter e-failed` goes on" in shown
    assert "queued for training: a-queued. A trainer takes one at a time" in " ".join(shown.split())
