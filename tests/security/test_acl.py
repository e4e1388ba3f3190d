"""The shipped users of Redis: each can do the work of its role, and nothing else."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from draftfleet import children, live
from draftfleet.claims import Claims, Taken
from draftfleet.errors import QueueRefused
from draftfleet.ports import free_port
from draftfleet.program import program
from draftfleet.queue import TRAIN, connect, generate_queue, make_app, publish, publish_training, queued
from draftfleet.runs import Run
from draftfleet.settings import environment
from draftfleet.storage import open_storage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed

Until = Callable[..., Any]
As = Callable[..., Any]

NOT_EVEN_ONE = [
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("KEYS", "*"),
    ("ACL", "LIST"),
    ("SHUTDOWN", "NOSAVE"),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LIST"),
    ("SET", "elsewhere", "1"),
    ("GET", "elsewhere"),
    ("EVAL", "return redis.call('GET', 'elsewhere')", "0"),
    ("PUBLISH", "elsewhere", "1"),
]
"""What no role may do."""

NOT_FOR = {
    "producer": [
        ("RPOP", "generate.tiny"),
        ("BRPOP", "train", "1"),
        ("DEL", "generate.tiny"),
        ("LRANGE", "generate.tiny", "0", "-1"),
        ("HGETALL", "unacked"),
        ("PUBLISH", "/0.celery.pidbox", "{}"),
    ],
    "worker": [("RPOP", "train"), ("DEL", "train"), ("LRANGE", "train", "0", "-1")],
    "trainer": [("RPOP", "generate.tiny"), ("DEL", "generate.tiny")],
    "flower": [
        ("LPUSH", "generate.tiny", "{}"),
        ("RPOP", "generate.tiny"),
        ("LRANGE", "generate.tiny", "0", "-1"),
        ("LPUSH", "train", "{}"),
        ("HGETALL", "unacked"),
        ("SET", "draftfleet:live:x", "{}"),
        ("GET", "draftfleet:live:x"),
    ],
}


@pytest.mark.parametrize("acl_redis", ["valkey", "redis"], indirect=True)
def test_no_user_may_do_what_its_role_does_not_need(acl_redis: As) -> None:
    allowed = [
        f"{user}: {' '.join(command)}"
        for user, more in NOT_FOR.items()
        for command in [*NOT_EVEN_ONE, *more]
        if not is_refused(connect(acl_redis(user)), command)
    ]

    assert allowed == []
    assert not is_refused(connect(acl_redis("admin")), ("SET", "elsewhere", "1"))


def is_refused(client: redis.Redis, command: tuple[str, ...]) -> bool:
    try:
        client.execute_command(*command)
    except redis.ResponseError as error:  # from within a script it is no NoPermissionError
        return isinstance(error, NoPermissionError) or any(
            word in str(error) for word in ("permission", "can't access", "ACL failure")
        )
    return False


def test_nobody_comes_in_without_a_password_or_with_another_s(acl_redis: As, tmp_path: Path) -> None:
    for url_of in ("", "default", "nobody"):
        port = acl_redis("worker").queue.url.get_secret_value().rpartition(":")[2]
        settings = acl_redis("worker")
        settings = changed(settings, queue__url=type(settings.queue.url)(f"redis://{url_of}@127.0.0.1:{port}"))
        with pytest.raises(QueueRefused, match="refused the login"):
            connect(settings)
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=int(port.partition("/")[0])).ping()
    assert connect(acl_redis("admin")).acl_whoami() == "admin"


def test_each_role_does_its_work_as_its_user(acl_redis: As, until: Until, tmp_path: Path, python: list[str]) -> None:
    """Produce, generate, train and look, each with the password of its own role."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Question {n}?"}) + "\n" for n in range(24)))
    producing = environment(acl_redis("producer", **{"producer.batch_size": 4}))
    storage = open_storage(f"file://{tmp_path}/storage")
    port, flower_password = free_port(), "a-long-flower-word"

    def flower(path: str) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
        request.add_header("Authorization", "Basic " + b64encode(f"draftfleet:{flower_password}".encode()).decode())
        try:
            return json.loads(urllib.request.urlopen(request, timeout=5).read())
        except OSError:
            return None

    seen = acl_redis("flower", **{"flower.port": port, "flower.password": flower_password})
    page = children.spawn([*python, "flower"], log=tmp_path / "flower.log", env=environment(seen))
    try:
        until(lambda: flower("/api/workers") is not None, what="Flower")
        with FakeServer(model="tiny") as server:
            settings = acl_redis("worker", **{"worker.servers": [server.url], "claims.sweep_s": 0.2})
            with WorkerProcess(settings, tmp_path / "worker.log") as worker:
                made = subprocess.run(
                    [*python, "produce", str(tmp_path / "prompts.jsonl")],
                    env=producing,
                    capture_output=True,
                    text=True,
                    timeout=120,
                    check=False,
                )
                assert made.returncode == 0, made.stderr
                run = Run.open(storage, "run")
                until(lambda: len(run.done()) == len(run.batches()) > 4 or not worker.is_running, what="the batches")
                assert worker.is_running, worker.log.read_text()
                until(
                    lambda: live.read(connect(acl_redis("producer"))), what="the worker's report, read by the producer"
                )
                shown = until(lambda: flower("/api/workers?refresh=1"), what="Flower's workers")
                until(lambda: flower("/api/tasks") or {}, what="Flower's tasks")

            assert not worker.said("NOPERM"), worker.log.read_text()
            assert not worker.said("ermission")
    finally:
        children.stop(page)
    refused = connect(acl_redis("admin")).acl_log()
    assert [(entry["username"], entry["reason"], entry["object"]) for entry in refused] == []
    assert any(name.startswith("worker-") for name in shown)
    assert "ermission" not in (tmp_path / "flower.log").read_text()

    asked = acl_redis("producer")
    publish_training(make_app(asked), connect(asked), run, "drafter")
    took: list[Any] = []
    training = acl_redis("trainer")
    app = make_app(training)
    claims = Claims(connect(training), run.run_id, training.claims, "trainer")

    def train(body: Any) -> None:
        assert isinstance(claims.take("train:drafter"), Taken)
        took.append(body)
        publish(app, connect(training), run, "tiny", ["train-000000"], retry=True)
        worker_of[0].stop()

    app.task(name=TRAIN)(train)
    worker_of = [program(app, "trainer@here", ["train"], concurrency=1)]
    worker_of[0].start()

    assert [body["drafter"] for body in took] == ["drafter"]
    assert queued(connect(asked), "tiny") == 1
    assert connect(acl_redis("admin")).exists(generate_queue("tiny")) == 0
