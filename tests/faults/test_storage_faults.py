"""A storage that is full: at the opening of a file, in its middle, when it is put in place. Nothing may be lost."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet import live
from draftfleet.queue import connect
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.checks import assert_complete, num_asked_again
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]


def files(storage: FileStorage, run: Run) -> list[Path]:
    """Whatever was begun and not put in place."""
    return [path for path in (storage.root / run.name).rglob(".*") if path.is_file()]


@pytest.mark.parametrize("call", ["open", "os.link", "os.rename"])
def test_a_full_storage_pauses_the_node_at_whatever_step_and_costs_no_row(
    call: str,
    quick: Settings,
    run: Run,
    storage: FileStorage,
    faulty_storage: Any,
    make_prompts: MakePrompts,
    until: Until,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(240)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=4)
        server.fault("stall", after=20, times=1)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log", wrapper=faulty_storage.wrapper) as worker:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            until(lambda: run.done() and list(run.partials()), what="a batch and rows on the storage")
            faulty_storage.fail(call)
            server.change(frozen=False, latency_s=0.1)
            said, *_ = until(lambda: worker.said("worker paused"), what="the pause")
            until(lambda: server.stats()["in_flight"] == 0, what="no more requests")
            until(lambda: not files(storage, run), what="no half file, between two tries")

            faulty_storage.mend()
            server.change(latency_s=0)
            until(lambda: run.done() == names, what="all batches done")
        again = num_asked_again(prompts, [server], [worker])

    assert "No space left on device" in said
    assert "storage reached again" in worker.log.read_text()
    assert again == 0
    assert_complete(run, prompts)


def test_a_storage_that_is_full_in_the_middle_of_a_file_leaves_no_half_file_and_costs_no_row(
    quick: Settings,
    run: Run,
    storage: FileStorage,
    make_prompts: MakePrompts,
    until: Until,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(240)
    redis = connect(quick)
    with FakeServer(model="tiny") as server:
        settings = changed(quick, worker__servers=[server.url], worker__concurrency=4)
        server.fault("stall", after=20, times=1)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            until(lambda: run.done() and list(run.partials()), what="a batch and rows on the storage")
            # The kernel lets no file of this process grow beyond that, its log included.
            _, most = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
            server.change(frozen=False, latency_s=0.1)
            until(lambda: [one for one in live.read(redis) if one.state == "paused"], what="the pause")
            until(lambda: server.stats()["in_flight"] == 0, what="no more requests")
            until(lambda: not files(storage, run), what="no half file, between two tries")
            whole = [run.read_samples(name) for name in run.done()]

            resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (most, most))
            server.change(latency_s=0)
            until(lambda: run.done() == names, what="all batches done")
        requests = server.stats()["requests"]

    assert all(whole)
    assert requests == len(prompts) + 1  # one canary
    assert_complete(run, prompts)
