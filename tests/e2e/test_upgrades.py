"""An older worker in a fleet that is being upgraded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftfleet import live
from draftfleet.queue import GENERATE, connect, generate_queue, keys, make_app
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]


def test_newer_messages_and_runs_wait_while_the_other_work_goes_on(
    settings: Settings, run: Run, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    newer = Run.create(storage, "newer", {"target.model": "tiny", "sampling.max_tokens": 64}, {})
    redis = connect(settings)
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url])
        enqueue(settings, newer, make_prompts(8))
        path = storage.root / "newer/run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
        bodies = [
            {"v": 2, "run_id": run.run_id, "run": run.name, "batch": f"train-00000{one}", "new": one}
            for one in range(3)
        ]
        with make_app(settings) as app:
            for body in bodies:
                app.send_task(GENERATE, args=[body], queue=generate_queue("tiny"), priority=3, ignore_result=True)
        names = enqueue(settings, run, make_prompts(16))

        def left() -> int:
            return sum(int(redis.llen(key)) for key in keys(generate_queue("tiny", 2)))

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names and left() >= 4, what="its own work, and the messages left")
            until(lambda: [one.reason for one in live.read(redis) if one.reason], what="the reason in its report")

    assert left() == 4
    assert len(worker.said("messages left to newer workers")) == 2
    assert worker.said("messages of version 2 are in the queue, this process reads up to version 1: upgrade it")
    assert worker.said("run newer is of schema version 2")
    assert redis.hlen(f"draftfleet:{newer.run_id}:attempts") == 0
    assert not (storage.root / "newer/samples").exists()
    assert not (storage.root / "newer/dead").exists()
