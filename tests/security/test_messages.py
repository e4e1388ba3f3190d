"""Whoever can write to the queue can name batches of runs that exist, and nothing else."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet.errors import CorruptFile, QueueError, StorageError
from draftfleet.queue import GENERATE, TRAIN, connect, generate_queue, queued
from draftfleet.records import SCHEMA_VERSION, Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue
from draftfleet.wire import BatchMessage, TrainMessage

ELSEWHERE = [
    *("..", ".", "", "/", "/etc", "../run", "run/../../x", "run/sub", "..\\run", "run\x00", "run\n", " run", "-run"),
    *("run\u202e", "%2e%2e", "~", "run;id", "$(id)", "ｒun", "run" * 40, "x" * 1_000_000),
]
"""Texts in the place of a name."""

NO_TEXT: list[Any] = [None, 0, -1, 1.5, True, [], ["run"], {}, {"run": "run"}, [[[[]]]], 10**30, float("inf")]
BATCHES = ["train-000000/../x", "train-1", "eval-000000", "train-000000.1", "train-0000000000000", "TRAIN-000000"]


def good(kind: type[BatchMessage] | type[TrainMessage], run_id: str = "0" * 32) -> dict[str, Any]:
    last = {"batch": "train-000000"} if kind is BatchMessage else {"drafter": "drafter"}
    return {"v": SCHEMA_VERSION, "run_id": run_id, "run": "run", **last}


def hostile(kind: type[BatchMessage] | type[TrainMessage], run_id: str = "0" * 32) -> list[Any]:
    message = good(kind, run_id)
    name = "batch" if kind is BatchMessage else "drafter"
    found: list[Any] = [{**message, key: text} for key in ("run", name, "run_id") for text in ELSEWHERE]
    found += [{**message, key: value} for key in message for value in NO_TEXT if (key, value) != ("v", True)]
    found += [{key: value for key, value in message.items() if key != left_out} for left_out in message]
    found += [{**message, "more": "x"}, {**message, "\x1b[2J" * 1000: 1}, {**message, "v": 2}, {**message, "v": "1"}]
    found += [{**message, "batch": batch} for batch in BATCHES] if kind is BatchMessage else []
    return [*found, *NO_TEXT, "run", [message], json.loads("[" * 500 + "]" * 500)]


@pytest.mark.parametrize("kind", [BatchMessage, TrainMessage])
def test_only_an_exact_message_is_one_and_the_refusal_stays_short(
    kind: type[BatchMessage] | type[TrainMessage],
) -> None:
    assert kind.parse(good(kind)).model_dump() == good(kind)

    for body in hostile(kind):
        with pytest.raises(QueueError) as error:
            kind.parse(body)
        assert len(str(error.value)) < 500


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def envelope(payload: bytes, kind: str = "application/json", name: str = GENERATE, **headers: Any) -> str:
    """What Celery puts into Redis for one message."""
    delivery = {"exchange": "", "routing_key": generate_queue("tiny")}
    properties = {"delivery_info": delivery, "body_encoding": "base64", "delivery_tag": "x", "correlation_id": "x"}
    message = {"body": base64.b64encode(payload).decode(), "content-type": kind, "content-encoding": "binary"}
    told = {"task": name, "id": "x", "lang": "py", "retries": 0, **headers}
    return json.dumps(message | {"headers": told, "properties": properties})


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def test_hostile_entries_do_nothing_read_nothing_and_end_no_worker(
    settings: Settings,
    storage: FileStorage,
    run: Run,
    make_prompts: Callable[..., list[Prompt]],
    until: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Runs beside the storage and in its other folders are canaries: a message that reached one would complete it."""
    outside = Run.create(FileStorage(tmp_path / "outside"), "other", run.info.content, {})
    outside.write_prompts("train-000000", make_prompts(1, start=900))
    (storage.root / "run" / "inner").symlink_to(tmp_path / "outside")
    moved = storage.root / "moved"  # a run.json that names another folder
    moved.mkdir()
    (moved / "run.json").write_text(json.dumps({**json.loads(storage.read("run/run.json")), "run": "../outside/other"}))
    before = snapshot(tmp_path / "outside"), snapshot(moved)
    pickled = pickle.dumps(([Payload(tmp_path / "ran")], {}, {}))
    yaml = f"!!python/object/apply:pathlib.Path.touch [{tmp_path / 'ran'}]".encode()
    bodies = [*hostile(BatchMessage, run.run_id), {**good(BatchMessage, outside.run_id), "run": "../outside/other"}]
    bodies += [{**good(BatchMessage, run.run_id), "run": name} for name in ("moved", "run/inner/other")]
    entries = [
        *("[" * 200_000, '{"a":' * 200_000, "9" * 10_000, '{"body": ' + "1" * 10_000 + "}"),
        envelope(b"[" * 200_000 + b"]" * 200_000),
        envelope(b"9" * 10_000),
        *(envelope(pickled, f"application/{kind}") for kind in ("x-python-serialize", "x-pickle", "json", "data")),
        *(envelope(yaml, f"application/{kind}") for kind in ("x-yaml", "yaml")),
        envelope(pickled, "application/x-python-serialize", compression="gzip"),
        *(envelope(json.dumps([[body], {}, {}]).encode()) for body in bodies),
        *(envelope(json.dumps([[], {"body": good(BatchMessage)}, {"chain": [{"task": "x"}]}]).encode()) for _ in "1"),
        envelope(json.dumps([[1, 2, 3], {"x": 1}, {}]).encode()),
        envelope(json.dumps([[good(TrainMessage)], {}, {}]).encode(), name=TRAIN),
    ]
    client = connect(settings)
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url], claims__sweep_s=0.2)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            client.lpush(generate_queue("tiny"), *entries)
            for name in ("../../outside/x", "train:../x", "train:", "x\x1b[2J", "train-000000/..", "y" * 10_000):
                client.hset(f"draftfleet:{run.run_id}:claims", name, json.dumps(["token", "gone", 1, 0]))
            names = enqueue(settings, run, make_prompts(16))
            until(lambda: run.done() == names or not worker.is_running, what="the batches", deadline_s=120)
            until(lambda: queued(client, "tiny") == 0 or not worker.is_running, what="an empty queue")
            until(lambda: len(worker.said("claim dropped")) == 6 or not worker.is_running, what="the claims' end")
            is_running = worker.is_running
        said = worker.log.read_text()

    assert is_running, said[-2000:]
    assert not (tmp_path / "ran").exists()
    assert (snapshot(tmp_path / "outside"), snapshot(moved)) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "redis", "storage", "worker.log"]
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) < 5000


def test_a_path_that_leads_out_of_the_storage_is_refused_by_the_storage_itself(storage: FileStorage) -> None:
    storage.put("run/file", b"")

    for path in ("../outside", "run/../../outside", "/etc/passwd", "run/a\x00b"):
        for use in (storage.read, storage.exists, storage.delete, storage.local, lambda path: list(storage.list(path))):
            with pytest.raises(StorageError, match="leads out of"):
                use(path)
        for put in (storage.put, storage.put_if_absent):
            with pytest.raises(StorageError, match="leads out of"):
                put(path, b"")
        with pytest.raises(StorageError, match="leads out of"):
            storage.rename("run/file", path)


def test_a_run_whose_file_names_another_is_no_run(storage: FileStorage, run: Run) -> None:
    storage.put("copy/run.json", storage.read("run/run.json"))

    with pytest.raises(CorruptFile, match="it is of run 'run'"):
        Run.open(storage, "copy")
