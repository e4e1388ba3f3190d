"""The whole way of a prompt with a real object store as the storage: produced, answered, counted, verified."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet import status, verify
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment, load
from draftfleet.storage import open_storage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess

Until = Callable[..., Any]


@pytest.fixture
def on_s3(redis_server: Any, s3_server: str, s3_url: str, tmp_path: Path) -> Settings:
    """The address comes from the settings, the key from the environment."""
    del os.environ["AWS_ENDPOINT_URL_S3"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(30)))
    return load(
        flags={
            "queue.url": redis_server.url,
            "storage.url": s3_url,
            "storage.endpoint_url": s3_server,
            "target.model": "tiny",
            "run": "run",
            "producer.data": str(tmp_path / "prompts.jsonl"),
            "producer.batch_size": 8,
        }
    )


def test_a_run_on_an_object_store_is_produced_answered_counted_and_verified(
    on_s3: Settings, until: Until, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(model="tiny") as server:
        settings = on_s3.model_copy(update={"worker": on_s3.worker.model_copy(update={"servers": [server.url]})})
        produced = subprocess.run(
            [sys.executable, "-m", "draftfleet", "produce"],
            env=environment(settings), capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        run = Run.open(open_storage(settings.storage), "run")
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == run.batches(), what="all batches done", deadline_s=120)
            worker.send(signal.SIGTERM)
            assert worker.wait(60) == 0

    assert json.loads(produced.stdout)["run"] == "run"
    samples = [sample for batch in run.done() for sample in run.read_samples(batch)]
    assert len({sample.row_key for sample in samples}) == len(samples) == 30
    assert set(run.index.read()) == set(run.done())
    assert "user-secret" not in (tmp_path / "worker.log").read_text() + produced.stderr
    capsys.readouterr()

    assert status.show(settings, watch=False, as_json=True, repair=False) == 0
    assert json.loads(capsys.readouterr().out)["identity_holds"]
    assert verify.show(settings, repair=False, as_json=True, progress=False) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 30

    shard = f"run/samples/{run.done()[0]}.parquet"
    run.storage.put(shard, run.storage.read(shard)[:-1])
    assert verify.show(settings, repair=True, as_json=True, progress=False) == 1
    assert json.loads(capsys.readouterr().out)["moved"] == [run.batches()[0]]
    assert len(run.done()) == len(run.batches()) - 1
