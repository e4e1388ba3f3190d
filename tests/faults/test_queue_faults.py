"""A queue that holds what nobody should have put there."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftfleet.queue import GENERATE, connect, generate_queue, queued
from draftfleet.records import SCHEMA_VERSION, Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue


def envelope(payload: str, content_type: str = "application/json", **headers: Any) -> str:
    """What Celery puts into Redis for one message."""
    delivery = {"exchange": "", "routing_key": generate_queue("tiny")}
    properties = {"delivery_info": delivery, "body_encoding": "base64", "delivery_tag": "x", "correlation_id": "x"}
    message = {"body": payload, "content-type": content_type, "content-encoding": "utf-8"}
    return json.dumps(message | {"headers": headers, "properties": properties})


def task(body: dict[str, Any], name: str = GENERATE) -> str:
    args = [[body], {}, {}]
    return envelope(base64.b64encode(json.dumps(args).encode()).decode(), task=name, id="x", lang="py", retries=0)


def test_entries_of_the_queue_that_are_no_messages_are_dropped_and_end_no_worker(
    settings: Settings,
    run: Run,
    make_prompts: Callable[..., list[Prompt]],
    until: Callable[..., Any],
    tmp_path: Path,
) -> None:
    ours: dict[str, Any] = {"v": SCHEMA_VERSION, "run_id": run.run_id, "run": run.name}
    entries: list[str | bytes] = [
        *("no JSON", b"\xff\xfe", "{}", "[]", "7", "null"),
        envelope("no base64!"),
        envelope(base64.b64encode(b"{{{").decode(), task=GENERATE, id="x", lang="py"),
        envelope(base64.b64encode(b"\x80\x04.").decode(), "application/x-python-serialize", task=GENERATE, id="x"),
        task({**ours, "batch": "train-000000"}, "os.system"),
        task({**ours, "v": SCHEMA_VERSION + 1, "batch": "train-000000"}),
        task({**ours, "run_id": "0" * 32, "batch": "train-000000"}),
        task({**ours, "run": "../run", "batch": "train-000000"}),
        task({**ours, "batch": "../../train-000000"}),
        task({**ours, "batch": "train-999999"}),
    ]
    redis = connect(settings)
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url])
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            for entry in entries:
                redis.lpush(generate_queue("tiny"), entry)
            names = enqueue(settings, run, make_prompts(16))
            until(lambda: run.done() == names or not worker.is_running, what="the batches")
            until(lambda: queued(redis, "tiny") == 0 or not worker.is_running, what="an empty queue")
            is_running = worker.is_running

    assert is_running
    assert run.done() == names
    assert len(worker.said("is no message of Celery")) == 7
    assert len(worker.said("is not a BatchMessage")) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["redis", "storage", "worker.log"]
