"""Servers that fail in every way they know. A row is lost only where the server said that it is the row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.testing import FakeProcess, FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]


def outcomes(run: Run) -> dict[str, Counter[str]]:
    return {name: Counter(sample.outcome for sample in run.read_samples(name)) for name in run.done()}


def test_a_row_that_is_refused_fails_at_once_and_costs_its_neighbours_nothing(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(16)
    with FakeServer(model="tiny") as server:
        server.fault("status", status=400, contains="Question 11?")
        settings = changed(settings, worker__servers=[server.url])
        names = enqueue(settings, run, prompts)

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="all batches done")
        asked = server.stats()["rows"]["Question 11?"]["requests"]

    samples = [sample for name in names for sample in run.read_samples(name)]
    failed = [sample for sample in samples if sample.outcome == "failed"]
    assert [sample.row_key for sample in failed] == [prompts[11].row_key]
    assert asked == 1
    assert failed[0].error_status == 400
    assert failed[0].server == server.url
    assert failed[0].error is not None
    assert prompts[11].prompt_id in failed[0].error
    assert "ordered fault" in failed[0].error
    assert not worker.said("Question 11?")


def test_passing_faults_of_every_kind_cost_no_row(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as one, FakeServer(model="tiny") as other:
        for kind in ("abort", "cut", "garbage", "close"):
            one.fault(kind, after=1, times=2)
        one.fault("status", status=500, after=1, times=2)
        other.fault("status", status=503, after=1, times=2)
        settings = changed(settings, worker__servers=[one.url, other.url], worker__concurrency=4)
        names = enqueue(settings, run, make_prompts(48))

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="all batches done")
        statuses = Counter[str]()
        for server in (one, other):
            statuses.update(server.stats()["statuses"])

    assert sum(counts["failed"] for counts in outcomes(run).values()) == 0
    assert min(statuses["503"], statuses["500"]) >= 1


def test_overload_is_waited_out_and_is_no_try_of_a_row(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        server.fault("status", status=429, retry_after="0.1", after=1, times=12)
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4, worker__max_tries=1)
        names = enqueue(settings, run, make_prompts(16))

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="all batches done")
        stats = server.stats()

    assert stats["statuses"] == {"200": 17, "429": 12}  # one canary
    assert sum(counts["failed"] for counts in outcomes(run).values()) == 0


def test_a_server_that_never_answers_a_row_loses_it_to_another_server(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as hanging, FakeServer(model="tiny", latency_s=0.1) as sound:
        hanging.fault("hang", after=1)
        settings = changed(
            settings,
            worker__servers=[hanging.url, sound.url],
            worker__concurrency=2,
            worker__request_timeout_s=1.5,
        )
        names = enqueue(settings, run, make_prompts(16))

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="all batches done")

    assert sum(counts["failed"] for counts in outcomes(run).values()) == 0
    assert worker.said("gave no answer within worker.request_timeout_s = 1.5 s")


def test_a_row_that_no_server_can_answer_fails_after_its_tries_and_says_why(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        server.fault("abort", contains="Question 3?")
        settings = changed(settings, worker__servers=[server.url], worker__max_tries=3)
        names = enqueue(settings, run, make_prompts(8))

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="the batch")
        asked = server.stats()["rows"]["Question 3?"]["requests"]

    failed = [sample for sample in run.read_samples(names[0]) if sample.outcome == "failed"]
    assert asked == 3
    assert [sample.messages[0]["content"] for sample in failed] == ["Question 3?"]
    assert failed[0].error is not None
    assert "no answer in 3 tries" in failed[0].error
    assert "abort" in failed[0].error


def test_the_death_of_the_only_server_costs_no_try_and_work_goes_on_when_it_is_back(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeProcess(model="tiny", latency_s=0.2) as server:
        port = int(server.url.rpartition(":")[2])
        settings = changed(
            settings,
            worker__servers=[server.url],
            worker__concurrency=4,
            worker__max_tries=1,
            worker__probe_interval_s=0.2,
        )
        names = enqueue(settings, run, make_prompts(32))
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: len(run.done()) >= 1, what="a first batch")
            server.kill()
            until(lambda: worker.said("state=away"), what="the server to be missed")
            with FakeProcess(model="tiny", port=port):
                until(lambda: run.done() == names, what="all batches done")

    # One try per row, and none failed: requests that died with the server were not counted.
    assert sum(counts["failed"] for counts in outcomes(run).values()) == 0


def test_a_server_that_comes_back_with_another_model_gets_no_rows(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny", latency_s=0.1) as one, FakeServer(model="tiny", latency_s=0.1) as other:
        settings = changed(
            settings, worker__servers=[one.url, other.url], worker__concurrency=2, worker__probe_interval_s=0.2
        )
        names = enqueue(settings, run, make_prompts(40))
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: len(run.done()) >= 1, what="a first batch")
            other.change(model="another")
            until(lambda: run.done() == names, what="all batches done")
            is_running = worker.is_running

    assert is_running
    assert worker.said("server left out")
    assert sum(counts["failed"] for counts in outcomes(run).values()) == 0
