"""Orders as they lie in the storage and in Redis: control.json, priorities, budgets, clean-up, fleet.json, lists."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import TimeoutError as KombuTimeout

from draftfleet import cleanup, control, deletion, fleet, listing, live, orders
from draftfleet.accounting import Accountant
from draftfleet.budget import Budgets
from draftfleet.claims import Claims, published_key
from draftfleet.control import Control
from draftfleet.errors import CorruptFile, RunMissing, SettingsError
from draftfleet.names import batch_id
from draftfleet.queue import (
    SEP,
    STEPS,
    TRAIN_QUEUE,
    connect,
    generate_queue,
    make_app,
    note_ended,
    publish,
    publish_training,
    queued,
    retry_queue,
)
from draftfleet.reconcile import TRAIN_CLAIM, Reconciler
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.status import collect, warnings
from draftfleet.storage import FileStorage
from draftfleet.testing.workers import changed, enqueue

MODEL = "tiny"
BATCH = batch_id("train", 0)
MakePrompts = Callable[..., list[Prompt]]


@pytest.fixture
def client(settings: Settings) -> redis.Redis:
    return connect(settings)


@pytest.fixture
def app(settings: Settings) -> Celery:
    return make_app(settings)


@pytest.fixture
def reconciler(app: Celery, client: redis.Redis, storage: FileStorage, run: Run) -> Reconciler:
    knobs = load(flags={"claims.ttl_s": 0.02, "claims.grace_s": 0.1, "claims.republish_s": 0.1}).claims
    found = Reconciler(app, client, storage, knobs, {MODEL})
    found.discover()
    return found


def consumed(app: Celery, count: int) -> list[str]:
    """The batches of the next messages, in the order in which a worker would get them."""
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
            while len(arrived) < count:
                try:
                    connection.drain_events(timeout=10)
                except (TimeoutError, KombuTimeout):
                    break
    return arrived


def test_a_run_without_orders_is_running_and_an_unreadable_order_is_told(run: Run) -> None:
    assert control.read(run) == Control()

    control.change(run, None, state="paused", reason="why")
    found = control.read(run)
    assert (found.state, found.reason, found.is_running) == ("paused", "why", False)
    assert found.since is not None

    run.storage.put("run/control.json", b'{"state": "sleeping"}')
    with pytest.raises(CorruptFile, match="Delete it: the run is then"):
        control.read(run)


def test_priority_comes_before_everything_and_begun_batches_before_others_of_the_same_priority(
    app: Celery, client: redis.Redis, run: Run
) -> None:
    wanted: list[str] = []
    number = 0
    for priority in ("low", "normal", "high"):
        for retry in (False, True):
            names = [batch_id("train", number), batch_id("train", number + 1)]
            number += 2
            publish(app, client, run, MODEL, names, retry=retry, controlled=Control(priority=priority))
            wanted = [*names, *wanted]

    assert queued(client, MODEL) == len(wanted)
    assert consumed(app, len(wanted)) == wanted
    assert queued(client, MODEL) == 0


def test_flower_counts_the_queues_with_their_priorities(app: Celery, settings: Settings) -> None:
    from flower.utils.broker import Redis

    options = app.conf.broker_transport_options
    broker = Redis("redis://localhost", broker_options=options)

    assert broker.priority_steps == list(STEPS.values())
    assert broker.sep == SEP


def test_nothing_of_a_paused_run_is_published_and_resume_publishes_all_of_it_at_once(
    settings: Settings, app: Celery, client: redis.Redis, run: Run, reconciler: Reconciler, make_prompts: MakePrompts
) -> None:
    names = enqueue(settings, run, make_prompts(24))
    orders.pause(settings, reason="")
    client.flushall()
    Claims(client, run.run_id, settings.claims, "somebody").take(names[2])

    assert publish(app, client, run, MODEL, names) == 0
    assert reconciler.republish() == 0
    assert queued(client, MODEL) == 0
    said = orders.resume(settings)

    assert "2 batches were published" in said
    assert sorted(consumed(app, 2)) == names[:2]


def test_an_order_holds_though_redis_is_away(
    settings: Settings, redis_server: Any, run: Run, make_prompts: MakePrompts, capsys: pytest.CaptureFixture[str]
) -> None:
    enqueue(settings, run, make_prompts(8))
    redis_server.stop()

    orders.pause(settings, reason="night")
    said = orders.resume(settings)

    assert control.read(run).is_running
    assert "publishes what is outstanding within" in said
    assert "The order holds all the same" in capsys.readouterr().err


def test_an_order_holds_though_the_lock_lapsed_while_it_was_written(
    client: redis.Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = FileStorage.put

    def put_slowly(storage: FileStorage, name: str, raw: bytes) -> None:
        put(storage, name, raw)
        assert client.delete(f"draftfleet:{run.run_id}:control") == 1

    monkeypatch.setattr(FileStorage, "put", put_slowly)

    assert control.change(run, client, state="paused").state == "paused"
    assert control.read(run).state == "paused"


def test_status_and_the_list_show_why_and_since_when(
    settings: Settings, run: Run, make_prompts: MakePrompts, capsys: pytest.CaptureFixture[str]
) -> None:
    enqueue(settings, run, make_prompts(3))
    control.change(run, None, state="cancelled", reason="enough of it", priority="low", token_budget=5)

    state = collect(settings, Accountant(run))
    listing.show(settings, as_json=True)
    [listed] = json.loads(capsys.readouterr().out)
    listing.show(settings, as_json=False)

    assert [text for text in warnings(state) if "the run is cancelled since" in text and "enough of it" in text]
    assert (listed["run"], listed["model"], listed["state"], listed["priority"]) == ("run", MODEL, "cancelled", "low")
    assert (listed["pending"], listed["ok"], listed["token_budget"]) == (3, 0, 5)
    assert "cancelled" in capsys.readouterr().out


def test_a_priority_that_is_none_is_refused(settings: Settings, run: Run) -> None:
    with pytest.raises(SettingsError, match="high, normal, low"):
        orders.set_priority(settings, priority="urgent")


def test_a_budget_counts_shards_and_live_reports_once_and_one_process_looks(
    settings: Settings,
    client: redis.Redis,
    run: Run,
    make_prompts: MakePrompts,
    make_sample: Callable[..., Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftfleet.budget.SHARE", 1e9)
    prompts = make_prompts(4)
    run.write_prompts(BATCH, prompts[:2])
    run.write_prompts(batch_id("train", 1), prompts[2:])
    report = live.WorkerReport(process="w", host="h", pid=1, started_at=0, state="working")
    row = live.RunReport(run="run", run_id=run.run_id, ok=2, tokens=6)
    control.change(run, None, token_budget=10)
    ours, theirs = Budgets(client, MODEL), Budgets(client, MODEL)

    live.publish(client, report.model_copy(update={"runs": [row]}))
    assert ours.check([run]) == theirs.check([run]) == []
    run.commit(BATCH, [make_sample(prompt) for prompt in prompts[:2]])  # 6 tokens; the report is still the old one
    assert ours.check([run]) == []

    client.set(f"draftfleet:budgets:{MODEL}", "another's")  # as after a look that took longer than the lease
    assert ours.check([run]) == []
    client.delete(f"draftfleet:budgets:{MODEL}")
    assert ours.check([run]) == []

    # In another thread, as the chore is.
    found: list[list[str]] = []
    looking = threading.Thread(target=lambda: found.append(ours.check([run])))
    looking.start()
    looking.join()

    assert found == [["run"]]  # 6 in the shard, and 6 that a report, which is new by now, has in none
    assert control.read(run).reason == "token budget of 10 reached: 12 tokens"


def test_a_finished_run_leaves_nothing_in_redis_or_in_partial_but_what_its_trainings_need(
    app: Celery,
    client: redis.Redis,
    run: Run,
    settings: Settings,
    reconciler: Reconciler,
    make_prompts: MakePrompts,
    make_sample: Callable[..., Sample],
) -> None:
    prompts = make_prompts(2)
    run.write_prompts(BATCH, prompts)
    publish(app, client, run, MODEL, [BATCH])
    client.hset(f"draftfleet:{run.run_id}:attempts", mapping={BATCH: 1, TRAIN_CLAIM + "d": 1})
    run.write_partial("dead-process", 0, [make_sample(prompts[0])])
    run.storage.put("run/partial/torn.jsonl", b'{"half')
    claims = Claims(client, run.run_id, settings.claims, "trainer")
    claims.take(TRAIN_CLAIM + "d")
    publish_training(app, client, run, "d")

    run.seal({"prompts": 2})
    reconciler.republish()
    assert len(list(run.partials())) == 2  # a row is outstanding: everything may still be needed
    assert client.hget(f"draftfleet:{run.run_id}:attempts", BATCH) == "1"
    run.commit(BATCH, [make_sample(prompt) for prompt in prompts])
    for _ in range(2):
        reconciler.republish()

    assert list(run.partials()) == []
    assert client.hkeys(published_key(run.run_id)) == [TRAIN_CLAIM + "d"]
    assert client.hkeys(f"draftfleet:{run.run_id}:attempts") == [TRAIN_CLAIM + "d"]
    assert claims.holder(TRAIN_CLAIM + "d") == "trainer"
    client.delete(f"draftfleet:{run.run_id}:attempts", f"draftfleet:{run.run_id}:claims", published_key(run.run_id))
    cleanup.tidy(client, run)
    assert list(client.scan_iter(f"draftfleet:{run.run_id}:*")) == []


def test_a_deletion_takes_run_json_last_whatever_folders_the_run_has(
    storage: FileStorage, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("ids/0.bin", "unreadable/train-000000.json", "samples/train-000000.parquet", "sealed.json"):
        storage.put(f"run/{path}", b"{}")
    left: list[list[str]] = []
    delete_folder = storage.delete_folder

    def look_first(path: str) -> None:
        if path == "run":
            left.append([*storage.folders("run"), *storage.list("run")])
        delete_folder(path)

    monkeypatch.setattr(storage, "delete_folder", look_first)
    deletion.remove_files(storage, "run")

    assert left == [["run.json"]]
    assert "run" not in set(storage.folders())


def test_keys_that_a_frozen_worker_puts_after_the_deletion_go_away(
    client: redis.Redis, run: Run, settings: Settings, reconciler: Reconciler
) -> None:
    other = Claims(client, "another-run", settings.claims, "somebody")
    other.take(BATCH)
    control.bury(run)
    Claims(client, run.run_id, settings.claims, "woken").take(BATCH)

    reconciler.republish()

    assert list(client.scan_iter(f"draftfleet:{run.run_id}:*")) == []
    assert other.held() == {BATCH}


def test_a_training_whose_message_was_lost_is_asked_for_again_and_one_that_ended_is_not(
    app: Celery, client: redis.Redis, run: Run, reconciler: Reconciler, settings: Settings, until: Callable[..., Any]
) -> None:
    for name in ("lost", "done", "failed", "at-work"):
        run.storage.put(f"run/drafters/{name}/drafter-settings.json", b"{}")
    run.storage.put("run/drafters/done/progress.json", b'{"finished": true}')
    note_ended(client, run.run_id, "failed")
    Claims(client, run.run_id, settings.claims, "trainer").take(TRAIN_CLAIM + "at-work")

    assert reconciler.ask_for_trainings() == 0  # a trainer may be about to renew its claim
    assert reconciler.ask_for_trainings() == 1

    [raw] = client.lrange(TRAIN_QUEUE, 0, -1)
    assert json.loads(raw)["headers"]["argsrepr"] == "run lost"
    assert reconciler.ask_for_trainings() == 0


def test_a_node_that_joins_takes_what_it_leaves_open_from_the_run(
    settings: Settings, storage: FileStorage, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = changed(settings, claims__ttl_s=33.0, claims__renew_s=11.0, target__path="/not/on/this/node")
    fleet.describe(run, settings)

    joined = fleet.join(None, {"storage.url": storage.url, "run": "run", "claims.renew_s": 7.0})

    assert (joined.model, joined.claims.ttl_s, joined.claims.renew_s) == (MODEL, 33.0, 7.0)
    assert joined.target.path == ""
    said = capsys.readouterr().err
    assert "from run run: claims.ttl_s = 33.0" in said
    assert "claims.renew_s" not in said
    assert "left out: target.path" in said
    assert settings.queue.url is not None
    password = settings.queue.url.get_secret_value().partition("@")[0].rpartition(":")[2]
    assert password
    assert password not in said + storage.read("run/fleet.json").decode()
    with pytest.raises(RunMissing, match="not in"):
        fleet.join(None, {"storage.url": storage.url, "run": "nobody"})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hush@host:6379/0", "redis://host:6379/0"),
        ("rediss://worker:hush@host/1", "rediss://worker@host/1"),
        ("redis://host", "redis://host"),
    ],
)
def test_the_address_of_the_queue_is_told_without_its_secret(url: str, shown: str) -> None:
    assert fleet.without_secret(url) == shown
