"""The trainer as it is run: a Celery worker on a real Redis, a training process under it, the tiny target."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftfleet import children
from draftfleet.claims import Claims, Taken
from draftfleet.embedded import Embedded
from draftfleet.errors import QueueError, RunConflict, RunMissing, SettingsError
from draftfleet.queue import TRAIN_QUEUE, connect, make_app, publish_training
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment, load
from draftfleet.storage import FileStorage
from trainer import checkpoint
from trainer.child import command
from trainer.progress import Progress
from trainer.tasks import enqueue
from trainer.train import train

TINY_TARGET = Path(__file__).parents[2] / "examples/tiny-target"
SERVE = (
    "import sys; from draftfleet import logs; from draftfleet.settings import load; from trainer.app import serve;"
    "logs.setup(); sys.exit(serve(load()))"
)

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def settings(redis_server: Embedded, run: Run) -> Settings:
    """A training too long to end by itself; `short` is one that ends."""
    return load(flags={
        "run": run.name,
        "queue.url": redis_server.url,
        "storage.url": run.storage.url,
        "target.path": str(TINY_TARGET),
        "trainer.drafter": "d",
        "trainer.max_steps": 100_000,
        "trainer.batch_tokens": 64,
        "trainer.checkpoint_steps": 5,
        "trainer.log_steps": 1,
        "trainer.poll_s": 0.05,
        "trainer.device": "cpu",
        "claims.ttl_s": 3,
        "claims.renew_s": 0.5,
        "claims.sweep_s": 0.2,
    })  # fmt: skip


def changed(settings: Settings, **trainer: Any) -> Settings:
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update=trainer)})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a trainer's worker process; whatever still runs at the end of the test is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def go(settings: Settings) -> subprocess.Popen[bytes]:
        started.append(
            children.spawn([sys.executable, "-c", SERVE], log=tmp_path / "trainer.log", env=environment(settings))
        )
        return started[-1]

    yield go
    for process in started:
        children.stop(process, grace_s=0)
    print((tmp_path / "trainer.log").read_text() if started else "")


def progress_of(run: Run) -> Progress:
    return Progress.read(run, "d") or Progress(step=-1, max_steps=0)


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def latest_step(run: Run) -> int:
    path = checkpoint.latest(run.drafter_dir("d"))
    return 0 if path is None else checkpoint.step_of(path)


def said_in_training(run: Run) -> str:
    return (run.drafter_dir("d") / "train.log").read_text()


class Flower:
    """Hears task events as Flower does."""

    def __init__(self, settings: Settings) -> None:
        self.heard: list[tuple[str, str]] = []
        self._app = make_app(settings)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(redis.ConnectionError), self._app.connection_for_read() as connection:
            self._app.events.Receiver(connection, handlers={"*": self._hear}).capture(limit=None, wakeup=False)

    def _hear(self, event: dict[str, Any]) -> None:
        if event["type"].startswith("task-"):
            self.heard.append((event["type"], str(event.get("result") or event.get("exception") or "")))

    def texts(self, kind: str) -> list[str]:
        return [text for type_, text in self.heard if type_ == kind]


def test_a_training_begun_before_there_are_shards_waits_follows_them_and_finishes(
    *, run: Run, settings: Settings, samples: Any, start: Start, until: Callable[..., Any]
) -> None:
    settings = changed(settings, max_steps=6)
    flower = Flower(settings)
    samples.prompts("train-000000", 12)
    samples.prompts("train-000001", 12)
    said = enqueue(settings)
    assert "d of run toy" in said

    start(settings)
    until(lambda: progress_of(run).waiting, what="waiting for the first shard")
    until(lambda: any("waiting for samples" in text for text in flower.texts("task-progress")), what="Flower told so")
    run.commit("train-000000", [samples.make("train-000000", f"a{n}") for n in range(12)])
    until(lambda: progress_of(run).rows_admitted == 12, what="the first shard admitted")
    run.commit("train-000001", [samples.make("train-000001", f"b{n}") for n in range(12)])
    run.seal({})
    until(lambda: flower.texts("task-succeeded"), what="the end of the task")

    progress = progress_of(run)
    assert (progress.step, progress.finished, progress.rows_admitted) == (6, True, 24)
    assert latest_step(run) == 6
    assert Claims(connect(settings), run.run_id, settings.claims, "test").held() == set()
    assert "step 6/6" in flower.texts("task-succeeded")[0]

    assert "drafter d of run toy is finished: step 6/6" in enqueue(settings)
    with make_app(settings) as app:  # asked before it was finished
        publish_training(app, connect(settings), run, "d")
    until(lambda: len(flower.texts("task-succeeded")) == 2, what="the end of the second task")

    assert "training had finished already" in said_in_training(run)


def test_a_killed_trainer_leaves_no_child_and_the_next_one_goes_on_from_the_checkpoint(
    *, run: Run, settings: Settings, samples: Any, start: Start, until: Callable[..., Any], redis_server: Embedded
) -> None:
    samples.put("train-000000")
    run.seal({})
    enqueue(settings)
    first = start(settings)
    until(lambda: latest_step(run) >= 10, what="a checkpoint")
    orphans = family(first)
    assert orphans

    first.kill()
    until(lambda: not any(one.is_running() and one.status() != "zombie" for one in orphans), deadline_s=10)
    left = latest_step(run)
    second = start(settings)
    until(lambda: latest_step(run) >= left + 5, what="a checkpoint of the next trainer")

    assert f"training resumed checkpoint={run.drafter_dir('d')}/checkpoints/step-{left:06d}" in said_in_training(run)

    # Without Redis the training goes on, and has its claim again when Redis is back.
    redis_server.stop()
    left = latest_step(run)
    until(lambda: latest_step(run) >= left + 10, what="checkpoints without Redis")
    redis_server.start()
    claims = Claims(connect(settings), run.run_id, settings.claims, "test")
    until(lambda: (claims.sweep(), claims.holder("train:d"))[1], what="the claim renewed")

    orphans = family(second)
    second.send_signal(signal.SIGTERM)

    assert second.wait(30) == 0
    assert not any(one.is_running() for one in orphans)
    assert latest_step(run) == progress_of(run).step
    client = connect(settings)
    assert client.llen(TRAIN_QUEUE) >= 1
    assert Claims(client, run.run_id, settings.claims, "test").held() == set()


def test_a_message_whose_drafter_is_being_trained_is_dropped(
    *, run: Run, settings: Settings, start: Start, until: Callable[..., Any]
) -> None:
    flower = Flower(settings)
    claims = Claims(connect(settings), run.run_id, settings.claims.model_copy(update={"ttl_s": 60.0}), "somebody")
    claims.take("train:d")

    enqueue(settings)
    start(settings)
    until(lambda: flower.texts("task-succeeded"), what="the end of the task")

    assert "somebody is at work on it" in flower.texts("task-succeeded")[0]
    assert not (run.drafter_dir("d") / "train.log").exists()


def test_a_training_that_fails_says_why_in_its_task_and_is_not_tried_again_by_itself(
    *, run: Run, settings: Settings, samples: Any, start: Start, until: Callable[..., Any]
) -> None:
    flower = Flower(settings)
    samples.put("train-000000")
    run.seal({})
    enqueue(settings)
    elsewhere = settings.model_copy(update={"target": settings.target.model_copy(update={"path": "/no/such/model"})})

    broken = start(elsewhere)
    until(lambda: flower.texts("task-failed"), what="the failure of the task")

    assert "/no/such/model" in flower.texts("task-failed")[0]
    assert "TrainingError" in flower.texts("task-failed")[0]
    broken.terminate()
    assert broken.wait(30) == 0
    client = connect(settings)
    assert client.llen(TRAIN_QUEUE) == client.hlen("unacked") == 0
    assert Claims(client, run.run_id, settings.claims, "test").held() == set()


def test_a_trainer_that_lost_its_claim_stops_and_puts_no_checkpoint(
    *, run: Run, settings: Settings, samples: Any, start: Start, until: Callable[..., Any]
) -> None:
    flower = Flower(settings)
    samples.put("train-000000")
    run.seal({})
    settings = changed(settings, checkpoint_steps=100_000)
    enqueue(settings)
    start(settings)
    until(lambda: progress_of(run).step >= 3, what="some steps")

    client = connect(settings)
    client.hdel(f"draftfleet:{run.run_id}:claims", "train:d")
    thief = Claims(client, run.run_id, settings.claims.model_copy(update={"ttl_s": 60.0}), "thief")
    assert isinstance(thief.take("train:d"), Taken)
    until(lambda: flower.texts("task-failed"), what="the end of the task")

    assert "taken over by another trainer" in flower.texts("task-failed")[0]
    assert latest_step(run) == 0
    assert thief.holder("train:d") == "thief"


def test_a_message_of_another_run_of_that_name_and_an_entry_that_is_no_message_are_dropped(
    *, run: Run, settings: Settings, start: Start, until: Callable[..., Any], tmp_path: Path
) -> None:
    flower = Flower(settings)
    other = Run.create(FileStorage(tmp_path / "other"), run.name, {}, {})
    enqueue(settings)
    connect(settings).delete(TRAIN_QUEUE)

    connect(settings).lpush(TRAIN_QUEUE, "no message")
    publish_training(make_app(settings), connect(settings), other, "d")
    start(settings)
    until(lambda: flower.texts("task-succeeded"), what="the end of the task")

    assert "dropped" in flower.texts("task-succeeded")[0]
    assert not (run.drafter_dir("d") / "train.log").exists()


def test_a_second_request_with_other_settings_is_refused(run: Run, settings: Settings) -> None:
    enqueue(settings)

    with pytest.raises(RunConflict, match=r"trainer\.lr"):
        enqueue(changed(settings, lr=0.5))
    enqueue(changed(settings, keep_checkpoints=7))

    assert connect(settings).llen(TRAIN_QUEUE) == 2


def test_a_training_of_a_run_that_is_not_there_is_refused(settings: Settings) -> None:
    with pytest.raises(RunMissing, match="nowhere"):
        enqueue(settings.model_copy(update={"run": "nowhere"}))


def test_a_request_without_redis_is_refused_and_pins_nothing(
    run: Run, settings: Settings, redis_server: Embedded
) -> None:
    redis_server.stop()

    with pytest.raises(QueueError, match="does not answer"):
        enqueue(settings)

    assert not run.drafter_dir("d").exists()


def losses(run: Run, drafter: str) -> list[float]:
    board = EventAccumulator(str(run.drafter_dir(drafter) / "tensorboard")).Reload()
    return [scalar.value for scalar in board.Scalars("loss")]


def test_two_processes_train_as_one_does(run: Run, settings: Settings, samples: Any) -> None:
    samples.put("train-000000")
    run.seal({})
    settings = changed(settings, accumulation=2, max_steps=4)

    assert train(changed(settings, drafter="one"), threading.Event())
    together = environment(changed(settings, drafter="two", processes=2))
    subprocess.run(command(2), env=together, check=True, timeout=240, stdin=subprocess.DEVNULL)

    assert len(losses(run, "two")) == 4
    assert losses(run, "two") == pytest.approx(losses(run, "one"), rel=1e-5)


def test_more_processes_than_batches_in_a_step_are_refused_when_asked_for(run: Run, settings: Settings) -> None:
    with pytest.raises(SettingsError, match=r"trainer\.accumulation to 8"):
        enqueue(changed(settings, processes=8, accumulation=4))

    assert not run.drafter_dir("d").exists()
