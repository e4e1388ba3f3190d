"""Servers that fail in every way they know. A row is lost only where the server said that it is the row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftfleet import live
from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.ports import is_free
from draftfleet.queue import connect
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeProcess, FakeServer
from draftfleet.testing.checks import assert_complete, num_asked_again, num_kept
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]


WATCHFUL = {"worker__probe_interval_s": 0.2, "worker__concurrency": 4, "worker__max_tries": 1}
"""One try per row, so that a row fails if what the worker took back from a server counts as a try."""


def num_failed(run: Run) -> int:
    """Of a run that is not through, whose account has to add up all the same."""
    account = Accountant(run).account()
    assert account.holds
    return account.failed


def num_struck(*servers: FakeServer) -> int:
    """Requests that a fault hit."""
    return sum(sum(server.stats(rows=False)["faults"].values()) for server in servers)


def ports_in_a_row(count: int) -> int:
    """The first of so many free ones."""
    return next(
        first
        for first in range(21000, 32000, count)
        if all(is_free("127.0.0.1", port) for port in range(first, first + count))
    )


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
    assert_complete(run, prompts, num_failed=1)


def test_passing_faults_of_every_kind_cost_no_row(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(96)
    with FakeServer(model="tiny", latency_s=0.2) as one, FakeServer(model="tiny", latency_s=0.2) as other:
        for kind in ("abort", "cut", "garbage", "close"):
            one.fault(kind, after=1, times=2)
        one.fault("status", status=500, after=1, times=1)
        other.fault("status", status=503, after=1, times=2)
        settings = changed(settings, worker__servers=[one.url, other.url], worker__concurrency=4)
        names = enqueue(settings, run, prompts)

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="all batches done")
        faults = [server.stats(rows=False)["faults"] for server in (one, other)]
        again = num_asked_again(prompts, [one, other], [worker])

    assert faults == [{"abort": 2, "cut": 2, "garbage": 2, "close": 2, "status": 1}, {"status": 2}]
    assert again == 9 + 2
    assert_complete(run, prompts)


def test_overload_is_waited_out_and_is_no_try_of_a_row(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        server.fault("status", status=429, retry_after="0.1", after=1, times=12)
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4, worker__max_tries=1)
        prompts = make_prompts(16)
        names = enqueue(settings, run, prompts)

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="all batches done")
        stats = server.stats()

    assert stats["statuses"] == {"200": 17, "429": 12}  # one canary
    assert_complete(run, prompts)


def test_a_server_that_never_answers_a_row_loses_it_to_another_server(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as hanging, FakeServer(model="tiny", latency_s=0.1) as sound:
        hanging.fault("hang", after=1)
        settings = changed(
            settings,
            worker__servers=[hanging.url, sound.url],
            worker__concurrency=2,
            worker__request_timeout_s=3,
        )
        prompts = make_prompts(16)
        names = enqueue(settings, run, prompts)

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="all batches done")
        again, struck = num_asked_again(prompts, [hanging, sound], [worker]), num_struck(hanging)

    assert again == struck >= 1
    assert worker.said("gave no answer within worker.request_timeout_s = 3 s")
    assert_complete(run, prompts)


def test_a_row_that_no_server_can_answer_fails_after_its_tries_and_says_why(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        server.fault("abort", contains="Question 3?")
        settings = changed(settings, worker__servers=[server.url], worker__max_tries=3)
        prompts = make_prompts(8)
        names = enqueue(settings, run, prompts)

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="the batch")
        asked = server.stats()["rows"]["Question 3?"]["requests"]

    failed = [sample for sample in run.read_samples(names[0]) if sample.outcome == "failed"]
    assert asked == 3
    assert [sample.messages[0]["content"] for sample in failed] == ["Question 3?"]
    assert failed[0].error is not None
    assert "no answer in 3 tries" in failed[0].error
    assert "abort" in failed[0].error
    assert_complete(run, prompts, num_failed=1)


def test_the_death_of_the_only_server_costs_no_try_and_work_goes_on_when_it_is_back(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    prompts = make_prompts(32)
    with FakeProcess(model="tiny") as server:
        port = int(server.url.rpartition(":")[2])
        server.fault("stall", after=20, times=1)
        settings = changed(settings, worker__servers=[server.url], **WATCHFUL)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            before = server.stats()["requests"]
            server.kill()
            until(lambda: worker.said("state=away"), what="the server to be missed")
            with FakeProcess(model="tiny", port=port) as back:
                until(lambda: run.done() == names, what="all batches done")
                again = before + num_asked_again(prompts, [back], [worker])

    # One try per row, and none failed: requests that died with the server were not counted.
    assert again == 4
    assert_complete(run, prompts)


def test_a_server_that_comes_back_with_its_reasoning_elsewhere_stops_the_worker_and_spoils_no_row(
    settings: Settings, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    content = {"target.model": "tiny", "sampling.max_tokens": 64, "sampling.thinking": True}
    run = Run.create(storage, "run", content, {})
    prompts = make_prompts(32)
    redis = connect(settings)
    with FakeServer(model="tiny") as server:
        server.fault("stall", after=20, times=1)
        settings = changed(settings, worker__servers=[server.url], **WATCHFUL)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "first.log") as first:
            until(lambda: server.stats()["in_flight"] == 4, what="rows in flight")
            server.change(alive=False, frozen=False, faults=[{"kind": "rename_reasoning"}])
            until(lambda: first.said("state=away"), what="the server to be missed")
            server.change(alive=True)
            code = first.wait()
        held = Claims(redis, run.run_id, settings.claims, "test").held()
        kept = num_kept(run)

        server.clear()
        with WorkerProcess(settings, tmp_path / "second.log") as second:
            until(lambda: run.done() == names, what="all batches done")
        samples = [sample for name in names for sample in run.read_samples(name)]

    assert code == 7
    assert first.said("thoughts")
    assert kept == 19
    assert held == set()
    assert redis.hlen(f"draftfleet:{run.run_id}:attempts") == 0
    assert all(sample.reasoning for sample in samples)
    assert second.said("canary passed")
    assert_complete(run, prompts)


def test_a_server_whose_counters_stand_still_loses_its_rows_to_another_and_works_again_when_it_moves(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny", latency_s=0.1) as stalled, FakeServer(model="tiny", latency_s=0.1) as sound:
        settings = changed(settings, worker__servers=[stalled.url, sound.url], worker__stall_s=1.5, **WATCHFUL)
        names = enqueue(settings, run, make_prompts(2000), batch_size=20)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: len(run.done()) >= 1, what="a first batch")
            until(lambda: stalled.stats()["in_flight"], what="rows on it")
            stalled.change(frozen=True)
            said = until(lambda: worker.said(f"server stalled server={stalled.url}"), what="the stall to be seen")
            until(lambda: set(names[:4]) <= set(run.done()), what="the batches of the rows that it held")

            stalled.change(frozen=False)
            answered = stalled.stats()["statuses"]["200"]
            until(lambda: stalled.stats()["statuses"]["200"] > answered + 4, what="rows on it again")

    assert "its counters stood still for worker.stall_s = 1.5 s" in said[0]
    assert num_failed(run) == 0


def test_a_server_that_has_forgotten_our_requests_loses_them_to_another(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny", latency_s=0.1) as ghost, FakeServer(model="tiny", latency_s=0.1) as sound:
        ghost.fault("ghost", after=6, times=1)
        settings = changed(settings, worker__servers=[ghost.url, sound.url], worker__ghost_s=1, **WATCHFUL)
        prompts = make_prompts(40)
        names = enqueue(settings, run, prompts)

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="all batches done")
        again = num_asked_again(prompts, [ghost, sound], [worker])

    assert [line for line in worker.said("it says that it works on nothing") if ghost.url in line]
    assert 1 <= again <= WATCHFUL["worker__concurrency"]
    assert_complete(run, prompts)


def test_a_server_that_comes_back_with_another_model_gets_no_rows_until_it_serves_the_right_one(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(settings)
    with FakeServer(model="tiny", latency_s=0.1) as one, FakeServer(model="tiny", latency_s=0.1) as other:

        def is_left_alone() -> bool:
            """By the worker's account: a request may be on its way that the server has not seen."""
            servers = [server for report in live.read(redis) for server in report.servers]
            return any((at.url, at.state, at.in_flight) == (other.url, "mismatched", 0) for at in servers)

        settings = changed(settings, worker__servers=[one.url, other.url], **WATCHFUL)
        enqueue(settings, run, make_prompts(2000), batch_size=20)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: len(run.done()) >= 1, what="a first batch")
            other.change(model="another")
            until(lambda: worker.said("server left out"), what="the other model to be seen")
            until(is_left_alone, what="its last answers")
            before, done = other.stats()["requests"], len(run.done())
            until(lambda: len(run.done()) > done, what="another batch, without it")
            assert other.stats()["requests"] == before

            other.change(model="tiny")
            until(lambda: other.stats()["requests"] > before + 4, what="rows on it")
            is_running = worker.is_running

    assert is_running
    assert len(worker.said(f"server ready server={other.url}")) == 2
    assert num_failed(run) == 0


def test_answers_that_break_off_in_a_row_let_a_server_rest_and_it_is_asked_again_when_it_is_well(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as broken, FakeServer(model="tiny", latency_s=0.1) as sound:
        broken.fault("status", status=500, after=1)
        settings = changed(settings, worker__servers=[broken.url, sound.url], **WATCHFUL | {"worker__max_tries": 30})
        names = enqueue(settings, run, make_prompts(40))
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: worker.said("server rests"), what="the rest")
            until(lambda: run.done() == names, what="all batches done")
            # Ten in a row, those that were in flight, and now and then a question of our own: no storm.
            assert broken.stats()["statuses"]["500"] < 40

            broken.clear()
            enqueue(settings, run, make_prompts(400, start=40))
            until(lambda: broken.stats()["statuses"].get("200", 0) > 5, what="rows on it")

    assert num_failed(run) == 0


def test_refused_rows_however_many_let_no_server_rest(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        server.fault("status", status=400, after=1)
        settings = changed(settings, worker__servers=[server.url], **WATCHFUL)
        names = enqueue(settings, run, make_prompts(40))

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="all batches done")
        stats = server.stats()

    assert num_failed(run) == 40
    assert stats["statuses"]["400"] == 40
    assert not worker.said("server rests")
    assert not worker.said("concurrency changed")


def test_a_server_that_comes_up_in_a_range_of_ports_joins_and_empty_ports_make_no_noise(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    first = ports_in_a_row(4)
    with FakeServer(model="tiny", port=first, latency_s=0.1):
        settings = changed(settings, worker__servers=[f"http://127.0.0.1:{first}-{first + 3}"], **WATCHFUL)
        enqueue(settings, run, make_prompts(400))
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: len(run.done()) >= 1, what="a first batch")
            with FakeServer(model="tiny", port=first + 2, latency_s=0.1) as late:
                until(lambda: late.stats()["statuses"].get("200", 0) > 4, what="rows on the late server")
                reports = live.read(connect(settings))[0].servers
                until(lambda: len(live.read(connect(settings))[0].servers) == 2, what="both in the report")

    assert {report.url.rpartition(":")[2] for report in reports} <= {str(first), str(first + 2)}
    for empty in (first + 1, first + 3):
        assert not worker.said(f":{empty}")


def test_an_adaptive_limit_finds_the_slots_of_a_server_and_says_so(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny", slots=24, latency_s=0.3) as server:
        settings = changed(
            settings, worker__servers=[server.url], worker__start_concurrency=4, worker__probe_interval_s=0.3
        )
        enqueue(settings, run, make_prompts(3000), batch_size=100)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: server.stats()["peak_in_flight"] == 24, what="every slot to be used")
            until(lambda: worker.said("concurrency changed"), what="a word of it")
            shown = until(
                lambda: next(
                    (one for one in live.read(connect(settings))[0].servers if one.gauges and one.limit >= 24), None
                ),
                what="the report",
            )

    assert not shown.pinned
    assert shown.because
