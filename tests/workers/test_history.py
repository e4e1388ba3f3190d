"""What a worker notes of its node, and what it never costs."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftfleet import history, logs
from draftfleet.errors import StorageUnwritable
from draftfleet.logs import event
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue
from workers.history import Recorder

log = logging.getLogger("workers.x")
SERVER = "http://127.0.0.1:8000"


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    logs.setup("ERROR")  # what the log shows does not decide what is noted
    made = Recorder("node-1-aaaaaa")
    yield made
    made.close()


def told(run: Run) -> list[str]:
    return [one.event for one in history.read(run).events]


def test_states_are_noted_once_and_rows_counted(recorder: Recorder, run: Run) -> None:
    for _ in range(3):
        log.warning(event("waiting for server", server=SERVER, state="away", reason="redis://user:secret@host"))
        log.info(event("row to be tried again", batch="b", server=SERVER, error="it broke off"))
    log.info(event("server ready", server=SERVER, limit=4))
    log.info(event("batch done", run="run", rows=8))
    log.warning(event("batch split", run="another", batch="b"))

    recorder.flush_to([run])
    recorder.flush_to([run])

    assert told(run) == ["waiting for server", "server ready", "rows tried again"]
    waiting, ready, again = history.read(run).events
    assert waiting.fields["reason"] == "redis://***@host"
    assert ready.fields["limit"] == 4
    assert (again.fields["rows"], again.process) == (3, "node-1-aaaaaa")


def test_a_storage_that_refuses_loses_nothing_and_raises_nothing(
    recorder: Recorder, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, data: bytes) -> None:
        raise StorageUnwritable("full")

    log.info(event("worker started"))
    with monkeypatch.context() as patch:
        patch.setattr(run.storage, "put", refuse)
        recorder.flush_to([run])
    log.info(event("worker draining"))
    recorder.flush_to([run])

    assert told(run) == ["worker started", "worker draining"]


def test_files_are_bounded_and_a_deleted_run_gets_none(recorder: Recorder, run: Run, storage: FileStorage) -> None:
    for number in range(1100):
        log.info(event("concurrency changed", server=SERVER, limit=number))
    recorder.flush_to([run])

    assert sorted(storage.list("run/history")) == [f"node-1-aaaaaa-00000{number}.jsonl" for number in range(3)]
    assert [one.fields["limit"] for one in history.read(run).events] == list(range(1100))
    storage.delete_folder("run")
    log.info(event("worker drained"))
    recorder.flush_to([run])
    assert not storage.exists("run/history/node-1-aaaaaa-000002.jsonl")


def test_a_damaged_line_is_counted(recorder: Recorder, run: Run, storage: FileStorage) -> None:
    log.info(event("worker started"))
    recorder.flush_to([run])
    path = storage.root / "run/history/node-1-aaaaaa-000000.jsonl"
    path.write_bytes(path.read_bytes() + b'{"at": 1}\n\xff torn')

    found = history.read(run)

    assert (len(found.events), found.damaged) == (1, 2)


def test_a_real_worker_notes_its_start_its_servers_and_its_end(
    settings: Settings, run: Run, make_prompts: Callable[..., list[Prompt]], until: Callable[..., Any], tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url], logs__level="WARNING")
        names = enqueue(settings, run, make_prompts(8))
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="all batches done")
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0

    events = told(run)
    assert {"server ready", "worker started", "run opened", "worker draining"} < set(events)
    assert events[-1] == "worker drained"
    assert worker.said("worker started") == []
