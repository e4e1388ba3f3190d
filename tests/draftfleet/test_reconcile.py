"""Whatever the queue lost is published again; whatever kills its worker is cornered, and its neighbours go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import Celery

from draftfleet import cleanup
from draftfleet.accounting import Accountant
from draftfleet.asking_again import Asking, create
from draftfleet.claims import Claims
from draftfleet.errors import QueueError
from draftfleet.names import batch_id, parts_of
from draftfleet.queue import TRAIN_QUEUE, connect, generate_queue, keys, make_app, publish, retry_queue
from draftfleet.reconcile import TRAIN_CLAIM, Reconciler
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage

Until = Callable[..., Any]
MODEL = "tiny"
BATCH = batch_id("train", 0)


@pytest.fixture
def client(settings: Settings) -> redis.Redis:
    return connect(settings)


@pytest.fixture
def app(settings: Settings) -> Celery:
    return make_app(settings)


@pytest.fixture
def knobs() -> Any:
    return load(flags={"claims.ttl_s": 0.02, "claims.max_attempts": 2, "claims.grace_s": 0.1}).claims


@pytest.fixture
def reconciler(app: Celery, client: redis.Redis, storage: FileStorage, knobs: Any, run: Run) -> Reconciler:
    reconciler = Reconciler(app, client, storage, knobs, {MODEL})
    assert [known.name for known in reconciler.discover()] == ["run"]
    return reconciler


def waiting(client: redis.Redis, queue: str) -> int:
    return sum(client.llen(key) for key in keys(queue))


def lapse(client: redis.Redis, run: Run, knobs: Any, name: str, reconciler: Reconciler, until: Until) -> None:
    Claims(client, run.run_id, knobs, "victim").take(name)
    until(reconciler.sweep)


def test_the_batch_of_a_dead_holder_goes_to_the_queue_that_is_consumed_first(
    reconciler: Reconciler, client: redis.Redis, run: Run, knobs: Any, until: Until, make_prompts: Any
) -> None:
    run.write_prompts(BATCH, make_prompts(3))

    lapse(client, run, knobs, BATCH, reconciler, until)

    assert waiting(client, retry_queue(MODEL)) == 1
    assert reconciler.sweep() == 0


def test_a_batch_whose_shard_came_late_is_not_published_again(
    reconciler: Reconciler, client: redis.Redis, run: Run, knobs: Any, until: Until, make_prompts: Any, make_sample: Any
) -> None:
    run.write_prompts(BATCH, make_prompts(1))
    run.commit(BATCH, [make_sample(prompt) for prompt in run.read_prompts(BATCH)])

    lapse(client, run, knobs, BATCH, reconciler, until)

    assert waiting(client, retry_queue(MODEL)) == 0


def test_a_batch_out_of_attempts_is_split_and_only_its_lone_bad_row_is_given_up(
    reconciler: Reconciler,
    client: redis.Redis,
    run: Run,
    knobs: Any,
    until: Until,
    make_prompts: Callable[..., list[Prompt]],
    make_sample: Callable[..., Sample],
) -> None:
    run.write_prompts(BATCH, make_prompts(3))
    run.seal({"prompts": 3})
    first, bad, last = parts_of(BATCH, 3)

    for _ in range(2):
        lapse(client, run, knobs, BATCH, reconciler, until)

    assert run.outstanding() == [first, bad, last]
    assert waiting(client, retry_queue(MODEL)) == 1 + 3

    for _ in range(2):
        lapse(client, run, knobs, bad, reconciler, until)
    for batch in (first, last):
        run.commit(batch, [make_sample(prompt, batch) for prompt in run.read_prompts(batch)])

    accounting = Accountant(run).account()
    assert (accounting.ok, accounting.failed, accounting.pending, accounting.dead) == (2, 1, 0, 1)
    assert accounting.holds
    assert "the only one of its batch" in str(run.dead()[bad].error)


def test_the_only_row_of_a_batch_is_parked_only_after_it_was_a_suspect_by_itself(
    reconciler: Reconciler, client: redis.Redis, run: Run, knobs: Any, until: Until, make_prompts: Any
) -> None:
    """Its worker may have ended of any other batch that it held: a whole batch does not wait for its turn."""
    run.write_prompts(BATCH, make_prompts(1))
    for _ in range(2):
        lapse(client, run, knobs, BATCH, reconciler, until)

    assert not run.dead()
    [alone] = run.outstanding()
    assert alone == parts_of(BATCH, 1)[0]
    for _ in range(2):
        lapse(client, run, knobs, alone, reconciler, until)

    assert [dead.error_kind for dead in run.dead().values()] == ["worker"]
    assert all(dead.started_at for dead in run.dead().values())


def test_a_row_whose_worker_ended_with_other_batches_in_hand_is_not_parked_for_it(
    reconciler: Reconciler, client: redis.Redis, run: Run, knobs: Any, until: Until, make_prompts: Any
) -> None:
    other = batch_id("train", 1)
    run.write_prompts(BATCH, make_prompts(2))
    run.write_prompts(other, make_prompts(2, start=2))
    run.split(BATCH, 2)
    suspect = parts_of(BATCH, 2)[0]

    for _ in range(4):
        claims = Claims(client, run.run_id, knobs, "victim")
        claims.take(suspect)
        claims.take(other)
        seen: list[int] = []
        until(lambda seen=seen: seen.append(reconciler.sweep()) or sum(seen) == 2)

    assert not run.dead()
    assert suspect in run.outstanding()
    lapse(client, run, knobs, suspect, reconciler, until)
    assert list(run.dead()) == [suspect]


def test_a_single_row_is_not_parked_when_its_whole_batch_came_late(
    reconciler: Reconciler, client: redis.Redis, run: Run, knobs: Any, until: Until, make_prompts: Any, make_sample: Any
) -> None:
    run.write_prompts(BATCH, make_prompts(2))
    run.split(BATCH, 2)
    run.commit(BATCH, [make_sample(prompt) for prompt in run.read_prompts(BATCH)])

    for _ in range(3):
        lapse(client, run, knobs, parts_of(BATCH, 2)[0], reconciler, until)

    assert not run.dead()


def test_a_damaged_prompt_shard_does_not_keep_other_lapsed_batches_waiting(
    reconciler: Reconciler, client: redis.Redis, run: Run, knobs: Any, until: Until, make_prompts: Any
) -> None:
    damaged, sound = batch_id("train", 0), batch_id("train", 1)
    run.storage.put(f"run/prompts/{damaged}.jsonl.gz", b"not gzip")
    run.write_prompts(sound, make_prompts(1))
    lapse(client, run, knobs, damaged, reconciler, until)
    claims = Claims(client, run.run_id, knobs, "victim")
    claims.take(damaged)
    claims.take(sound)

    seen: list[int] = []
    until(lambda: seen.append(reconciler.sweep()) or sum(seen) == 2)

    assert waiting(client, retry_queue(MODEL)) == 2


def test_a_lapsed_batch_is_not_forgotten_by_a_sweep_that_fails(
    reconciler: Reconciler, client: redis.Redis, run: Run, knobs: Any, until: Until, make_prompts: Any
) -> None:
    batches = [batch_id("train", number) for number in range(2)]
    for number, batch in enumerate(batches):
        run.write_prompts(batch, make_prompts(1, start=number))
        Claims(client, run.run_id, knobs, "victim").take(batch)
    client.set(retry_queue(MODEL), "no list, so nothing can be pushed")

    with pytest.raises(QueueError):
        until(reconciler.sweep)
    client.delete(retry_queue(MODEL))

    until(lambda: (reconciler.sweep(), waiting(client, retry_queue(MODEL)))[1] == 2)


def test_what_a_dying_sweeper_had_taken_is_published_with_the_missing_ones(
    reconciler: Reconciler, client: redis.Redis, app: Celery, run: Run, knobs: Any, until: Until, make_prompts: Any
) -> None:
    other = batch_id("train", 1)
    for number, batch in enumerate((BATCH, other)):
        run.write_prompts(batch, make_prompts(1, start=number))
    publish(app, client, run, MODEL, [BATCH, other])  # `other` waits on, so there is no hurry for what was published
    claims = Claims(client, run.run_id, knobs, "victim")
    claims.take(BATCH)

    until(claims.sweep)

    assert reconciler.republish() == 1
    assert waiting(client, retry_queue(MODEL)) == 1


def test_a_run_whose_files_are_damaged_does_not_keep_the_others_waiting(
    app: Celery, client: redis.Redis, storage: FileStorage, knobs: Any, run: Run, make_prompts: Any
) -> None:
    for name in ("a-run-before", "z-run-after"):
        Run.create(storage, name, {"target.model": MODEL}, {})
        storage.put(f"{name}/sealed.json", b"{")
    run.write_prompts(BATCH, make_prompts(1))

    assert Reconciler(app, client, storage, knobs).republish() == 1


def test_a_run_that_was_deleted_and_made_anew_is_the_new_one(
    reconciler: Reconciler, storage: FileStorage, run: Run
) -> None:
    shutil.rmtree(storage.root / run.name)
    assert reconciler.discover() == []

    again = Run.create(storage, run.name, {"target.model": MODEL}, {})

    assert [known.run_id for known in reconciler.discover()] == [again.run_id]


def test_a_message_that_was_lost_is_replaced_once_the_queue_is_empty(
    reconciler: Reconciler, client: redis.Redis, app: Celery, run: Run, make_prompts: Any, until: Until
) -> None:
    lost, done = batch_id("train", 0), batch_id("train", 1)
    run.write_prompts(lost, make_prompts(1))
    run.write_prompts(done, make_prompts(1, start=1))
    publish(app, client, run, MODEL, [lost, done])
    assert reconciler.republish() == 0

    client.delete(*keys(generate_queue(MODEL)))

    assert until(reconciler.republish) == 2
    assert waiting(client, retry_queue(MODEL)) == 2


def test_a_wiped_redis_is_refilled_from_storage(
    reconciler: Reconciler, client: redis.Redis, app: Celery, run: Run, make_prompts: Any, make_sample: Any
) -> None:
    for number in range(4):
        run.write_prompts(batch_id("train", number), make_prompts(1, start=number))
    publish(app, client, run, MODEL, run.batches())
    run.commit(BATCH, [make_sample(prompt) for prompt in run.read_prompts(BATCH)])

    client.flushall()

    assert reconciler.republish() == 3


def test_a_claimed_batch_is_left_to_its_holder(
    app: Celery, client: redis.Redis, storage: FileStorage, settings: Settings, run: Run, make_prompts: Any
) -> None:
    run.write_prompts(BATCH, make_prompts(1))
    claims = Claims(client, run.run_id, settings.claims, "worker")
    claims.take(BATCH)

    assert Reconciler(app, client, storage, settings.claims).republish() == 0


def test_one_process_at_a_time_compares_storage_and_queue(
    reconciler: Reconciler, client: redis.Redis, run: Run, make_prompts: Any
) -> None:
    run.write_prompts(BATCH, make_prompts(1))
    other = client.lock("draftfleet:reconciling", timeout=300, blocking=False)
    assert other.acquire()

    assert reconciler.republish() == 0


def test_a_reconciler_that_dies_holding_its_lock_is_succeeded(
    reconciler: Reconciler, client: redis.Redis, run: Run, make_prompts: Any, until: Until
) -> None:
    run.write_prompts(BATCH, make_prompts(1))
    client.lock("draftfleet:reconciling", timeout=0.2, blocking=False).acquire()

    assert until(reconciler.republish) == 1


def test_a_reconciler_that_lost_its_lock_ends_its_look_and_leaves_the_lock_to_its_new_holder(
    reconciler: Reconciler, client: redis.Redis, run: Run, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_prompts(BATCH, make_prompts(1))
    monkeypatch.setattr(cleanup, "remove_keys", lambda *_: client.set("draftfleet:reconciling", "another's"))

    assert reconciler.republish() == 1
    assert client.get("draftfleet:reconciling") == "another's"


def test_a_trainer_that_died_is_asked_again_until_it_is_out_of_attempts(
    reconciler: Reconciler, client: redis.Redis, run: Run, knobs: Any, until: Until
) -> None:
    lapse(client, run, knobs, TRAIN_CLAIM + "eagle3", reconciler, until)
    assert client.llen(TRAIN_QUEUE) == 1

    lapse(client, run, knobs, TRAIN_CLAIM + "eagle3", reconciler, until)
    assert client.llen(TRAIN_QUEUE) == 1


def test_runs_of_other_models_and_folders_that_are_no_runs_are_left_alone(
    app: Celery, client: redis.Redis, storage: FileStorage, knobs: Any, run: Run
) -> None:
    (storage.root / "somebodys-notes").mkdir()
    Run.create(storage, "other", {"target.model": "large"}, {})

    assert [known.name for known in Reconciler(app, client, storage, knobs, {MODEL}).discover()] == ["run"]


def test_a_finished_run_gets_work_again_by_a_batch_that_was_being_made_at_the_last_look(
    reconciler: Reconciler, run: Run, make_prompts: Any, make_sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_prompts(BATCH, make_prompts(1))
    run.commit(BATCH, [make_sample(prompt) for prompt in run.read_prompts(BATCH)])
    run.seal({"prompts": 1})
    put = run.write_prompts

    def look_first(batch: str, prompts: list[Prompt]) -> bool:
        assert reconciler.republish() == 0
        return put(batch, prompts)

    monkeypatch.setattr(run, "write_prompts", look_first)
    create(run, map(Asking, run.read_samples(BATCH)), batch_size=64)

    assert reconciler.republish() == 1


def test_a_shard_that_was_removed_by_hand_from_a_finished_run_is_missed_later(
    app: Celery, client: redis.Redis, storage: FileStorage, run: Run, make_prompts: Any, make_sample: Any, until: Until
) -> None:
    run.write_prompts(BATCH, make_prompts(1))
    run.commit(BATCH, [make_sample(prompt) for prompt in run.read_prompts(BATCH)])
    run.seal({"prompts": 1})
    reconciler = Reconciler(app, client, storage, load(flags={"claims.republish_s": 0.1}).claims)
    assert reconciler.republish() == 0

    storage.delete(f"{run.name}/samples/{BATCH}.parquet")

    assert until(reconciler.republish) == 1


def test_runs_of_other_models_are_opened_once(
    app: Celery, client: redis.Redis, storage: FileStorage, knobs: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run.create(storage, "other", {"target.model": "large"}, {})
    reconciler = Reconciler(app, client, storage, knobs, {MODEL})
    opened: list[str] = []
    read = storage.read
    monkeypatch.setattr(storage, "read", lambda path: (opened.append(path), read(path))[1])

    for _ in range(3):
        reconciler.discover()

    assert sorted(opened) == ["other/run.json", f"{run.name}/run.json"]
