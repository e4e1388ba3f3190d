"""What a worker does not start with, or stops at, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftfleet.claims import Claims
from draftfleet.errors import SettingsError
from draftfleet.queue import connect, queued
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue
from workers.app import work

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]
TINY_TARGET = Path(__file__).parents[2] / "examples/tiny-target"


def test_two_servers_with_different_models_are_refused_with_both_named(settings: Settings, tmp_path: Path) -> None:
    with FakeServer(model="tiny") as one, FakeServer(model="large") as other:
        settings = changed(settings, worker__servers=[one.url, other.url], target__model="")

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            code = worker.wait()

    assert code == 7
    assert worker.said(f"{one.url} serves tiny")
    assert worker.said(f"{other.url} serves large")


def test_a_server_without_the_model_that_is_asked_for_is_refused(settings: Settings, tmp_path: Path) -> None:
    with FakeServer(model="large") as server:
        settings = changed(settings, worker__servers=[server.url], target__model="tiny")

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            code = worker.wait()

    assert code == 7
    assert worker.said("asks for model tiny")
    assert worker.said(f"{server.url} serves large")


def test_an_unknown_dialect_is_refused_at_the_start_with_the_known_ones(settings: Settings, tmp_path: Path) -> None:
    settings = changed(settings, worker__servers=["http://127.0.0.1:9"], worker__dialect="esperanto")

    with WorkerProcess(settings, tmp_path / "worker.log") as worker:
        code = worker.wait()

    assert code == 2
    assert worker.said(
        "worker.dialect = 'esperanto': no such dialect; known are vllm, sglang, sglang-native, llamacpp,"
    )


def test_ollama_ends_the_worker_with_the_reason(settings: Settings, tmp_path: Path) -> None:
    with FakeServer(model="tiny", shape="ollama") as server:
        settings = changed(settings, worker__servers=[server.url])

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            code = worker.wait()

    assert code == 7
    assert worker.said(f"server {server.url} is left out: it is Ollama, which cuts a prompt that is over its context")


def test_a_knob_that_the_server_would_drop_ends_the_worker_before_any_row(
    settings: Settings, storage: FileStorage, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.max_tokens": 64, "sampling.top_k": 5}, {})
    with FakeServer(model="tiny", shape="transformers", tokenizer=str(TINY_TARGET)) as server:
        settings = changed(settings, worker__servers=[server.url], target__path=str(TINY_TARGET))
        enqueue(settings, run, make_prompts(4))

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            code = worker.wait()
        asked = server.stats()["requests"]

    assert code == 7
    assert worker.said("sampling.top_k = 5: transformers serve does not take it. Leave it out in a new run")
    assert asked == 0
    assert run.done() == []


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        ([], r"worker\.servers is empty"),
        (["localhost:8000"], r"'localhost:8000': write addresses as http://HOST:PORT"),
    ],
)
def test_servers_that_are_no_addresses_are_refused_at_once(settings: Settings, servers: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        work(changed(settings, worker__servers=servers))


def test_a_storage_that_is_no_folder_ends_the_worker(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = changed(settings, worker__servers=["http://127.0.0.1:9"], storage__url=str(tmp_path / "file"))

    with WorkerProcess(settings, tmp_path / "worker.log") as worker:
        code = worker.wait()

    assert code == 6
    assert worker.said("Correct storage.url")


def test_no_server_within_the_budget_ends_the_worker_and_costs_no_message(
    settings: Settings, run: Run, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    closed, unknown = "http://127.0.0.1:9", "http://no-such-host.invalid:8000"
    settings = changed(settings, worker__servers=[closed, unknown], worker__ready_timeout_s=0.5)
    names = enqueue(settings, run, make_prompts(16))

    with WorkerProcess(settings, tmp_path / "worker.log") as worker:
        code = worker.wait()

    assert code == 7
    assert worker.said("no server got ready within worker.ready_timeout_s = 0.5 s")
    assert worker.said(f"  {closed}: ")
    assert worker.said(f"  {unknown}: ")
    assert queued(connect(settings), "tiny") == len(names)


def test_a_second_worker_for_the_same_server_is_refused_and_told_which_is_the_first(
    settings: Settings, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url])
        with WorkerProcess(settings, tmp_path / "first.log") as first:
            until(lambda: first.said("server ready"), what="the first worker")

            with WorkerProcess(settings, tmp_path / "second.log") as second:
                code = second.wait()

    assert code == 4
    assert second.said(f"pid {first.pid}, started ")


def test_a_canary_that_finds_no_reasoning_stops_the_worker_and_gives_the_batch_back(
    settings: Settings, storage: FileStorage, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    content = {"target.model": "tiny", "sampling.max_tokens": 64, "sampling.thinking": True}
    run = Run.create(storage, "run", content, {})
    with FakeServer(model="tiny") as server:
        server.fault("rename_reasoning")
        settings = changed(settings, worker__servers=[server.url])
        names = enqueue(settings, run, make_prompts(16))

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            code = worker.wait()

    redis = connect(settings)
    claims = Claims(redis, run.run_id, settings.claims, "test")
    assert code == 7
    assert worker.said("thoughts")
    assert run.done() == []
    assert claims.held() == set()
    assert queued(redis, "tiny") == len(names)
    assert redis.hlen(f"draftfleet:{run.run_id}:attempts") == 0


def test_a_prompt_whose_answers_break_off_keeps_no_server_from_its_run(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    bad = Prompt("b" * 32, "train", [{"role": "user", "content": "Bad?"}])  # the shortest, so the first canary
    with FakeServer(model="tiny") as server:
        server.fault("status", status=500, contains="Bad?")
        settings = changed(settings, worker__servers=[server.url], worker__max_tries=2)
        names = enqueue(settings, run, [*make_prompts(7), bad])

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="the batch")

    assert len(worker.said("canary broke off")) == 1
    assert [sample.outcome == "failed" for sample in run.read_samples(names[0])] == [False] * 7 + [True]


def test_messages_of_unknown_runs_and_other_ids_are_dropped_and_said(
    settings: Settings, run: Run, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url])
        former = Run(storage, replace(run.info, run_id="0" * 32))
        gone = Run(storage, replace(run.info, run="gone"))
        for other in (former, gone):
            other_prompts = make_prompts(8)
            enqueue(settings, other, other_prompts)
        (storage.root / "gone/run.json").unlink(missing_ok=True)
        names = run.batches()

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: len(worker.said("message dropped")) == 2, what="two dropped messages")
            done = run.done()

    assert done == []
    assert names
    assert worker.said("run gone is not in")
    assert worker.said(f"has id {run.run_id}")


def test_rows_get_the_tokenizer_s_ids_and_a_prompt_over_the_context_fails_alone(
    settings: Settings, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.max_tokens": 100}, {})
    long = Prompt("f" * 32, "train", [{"role": "user", "content": "word " * 300}])
    medium = Prompt("e" * 32, "train", [{"role": "user", "content": "word " * 120}])
    with FakeServer(model="tiny", shape="transformers", tokenizer=str(TINY_TARGET)) as server:
        settings = changed(
            settings, worker__servers=[server.url], target__path=str(TINY_TARGET), target__context_tokens=220
        )
        names = enqueue(settings, run, [*make_prompts(6), long, medium])

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="the batch")
            asked = server.stats()["rows"]

    *samples, refused, fitted = run.read_samples(names[0])
    assert {sample.ids_source for sample in samples} == {"retokenized"}
    assert all(sample.ids_match_usage and sample.prompt_token_ids for sample in samples)
    assert refused.outcome == "failed"
    assert refused.error is not None
    assert "the context of" in refused.error
    assert "holds 220" in refused.error
    assert not any("word " * 300 in text for text in asked)
    assert fitted.outcome in ("ok", "truncated")
    assert fitted.prompt_tokens + fitted.completion_tokens <= 220
