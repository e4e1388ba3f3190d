"""Several samples of each prompt, drawn thinking, and cut answers that go on: real processes, a fake server."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet import drawing
from draftfleet.accounting import Accountant
from draftfleet.continuing import go_on
from draftfleet.outcomes import best
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue
from draftfleet.verify import verify
from producer.produce import produce

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]

TARGET = Path(__file__).parents[2] / "examples/tiny-target"
CUT_AT = 12
SHORT = {"claims__ttl_s": 1.5, "claims__renew_s": 0.3, "claims__sweep_s": 0.3, "claims__grace_s": 1}


def samples_of(run: Run) -> list[Sample]:
    return [sample for name in run.done() for sample in run.read_samples(name)]


def letters(*texts: str | None) -> str:
    """Without white space: the fake server cuts it off at both ends of what it says."""
    return "".join("".join((text or "").split()) for text in texts)


def test_n_samples_with_drawn_thinking_survive_a_worker_that_is_killed(
    settings: Settings, storage: FileStorage, until: Until, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"What is {i} + {i}?"}) + "\n" for i in range(40)))
    asked = {"sampling.n": 3, "sampling.thinking_share": 0.5, "sampling.seed": 1, "sampling.max_tokens": 128}
    mixture = [{"weight": 3, "temperature": 1.0}, {"temperature": 0.2, "max_tokens": 4096}]
    produced = load(
        flags={
            **asked,
            "sampling.mixture": mixture,
            "queue.url": settings.queue.url,
            "storage.url": settings.storage.url,
            "storage.min_free_gb": 0,
            "target.model": "tiny",
            "run": "run",
            "producer.data": str(data),
            "producer.batch_size": 8,
        }
    )
    report = produce(produced, progress=False)
    run = Run.open(storage, "run")
    with FakeServer(model="tiny", latency_s=0.2) as server:
        knobs = changed(produced, worker__servers=[server.url], worker__concurrency=4, **SHORT)
        with WorkerProcess(knobs, tmp_path / "killed.log") as worker:
            until(lambda: run.done() or run.partials(), what="finished rows")
            worker.send(signal.SIGKILL)
        with WorkerProcess(knobs, tmp_path / "worker.log"):
            until(lambda: set(run.done()) == set(run.batches()), what="all batches done")

    samples, said = samples_of(run), Accountant(run).account()
    ways = Counter(json.dumps(sample.drawn, sort_keys=True) for sample in samples)
    told = {
        json.dumps({k: v for k, v in way.items() if k != "rows"}, sort_keys=True): way["rows"] for way in report.drawn
    }
    assert (said.expected, said.ok, said.truncated + said.failed + said.pending, said.holds) == (120, 120, 0, True)
    assert Counter(sample.prompt_id for sample in samples) == dict.fromkeys({one.prompt_id for one in samples}, 3)
    assert {sample.sample for sample in samples} == {0, 1, 2}
    assert all(sample.drawn == drawing.drawn(produced.sampling, sample.row_key)[1] for sample in samples)
    assert all(bool(sample.reasoning) is (sample.drawn or {})["thinking"] for sample in samples)
    assert ways == {name: rows for name, rows in told.items() if rows}
    assert verify(run).faults == []


@pytest.mark.parametrize("path", ["", str(TARGET)], ids=["without a tokenizer", "with the target's"])
def test_answers_that_went_on_are_those_that_were_never_cut(
    path: str, settings: Settings, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    runs = {
        name: Run.create(storage, name, {"target.model": "tiny", "sampling.max_tokens": most}, {})
        for name, most in (("run", CUT_AT), ("uncut", 512))
    }
    prompts = make_prompts(20)
    with FakeServer(model="tiny", tokenizer=str(TARGET), tokens=40) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4, target__path=path)
        for run in runs.values():
            enqueue(settings.model_copy(update={"run": run.name}), run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: all(run.done() == run.batches() for run in runs.values()), what="all batches done")
            cut = samples_of(runs["run"])
            said = go_on(settings, max_tokens=512, dry_run=False)
            until(lambda: runs["run"].done() == runs["run"].batches(), what="the answers that went on")

    whole = {sample.row_key: sample for sample in samples_of(runs["uncut"])}
    kept = best(samples_of(runs["run"]))
    num_cut = sum(sample.outcome == "truncated" for sample in cut)
    assert said["rows"] == num_cut > 10
    assert {sample.outcome for sample in kept.values()} == {"ok"}
    for key, sample in kept.items():
        assert sample.token_ids == whole[key].token_ids
        assert sample.prompt_token_ids == whole[key].prompt_token_ids
        assert (sample.completion_tokens, sample.prompt_tokens) == (
            whole[key].completion_tokens,
            whole[key].prompt_tokens,
        )
        assert (sample.ids_source, sample.ids_match_usage, sample.finish_reason) == ("engine", True, "stop")
        assert letters(sample.reasoning, sample.content) == letters(whole[key].reasoning, whole[key].content)
        if (
            path
        ):  # without a tokenizer nobody can tell that an answer was cut right behind the mark that closes a thought
            assert letters(sample.reasoning) == letters(whole[key].reasoning)
    account = Accountant(runs["run"]).account()
    assert account.holds
    assert (account.ok, account.tokens) == (20, sum(one.completion_tokens for one in whole.values()))
    assert verify(runs["run"]).faults == []


def test_where_no_server_takes_ids_the_cut_answers_stand_and_the_reason_is_told(
    settings: Settings, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.max_tokens": CUT_AT}, {})
    with FakeServer(model="tiny", tokenizer=str(TARGET), tokens=40) as server:
        settings = changed(settings, worker__servers=[server.url], target__path=str(TARGET))
        enqueue(settings, run, make_prompts(6))
        with WorkerProcess(settings, tmp_path / "vllm.log"):
            until(lambda: run.done() == run.batches(), what="cut answers")
        server.change(shape="openai")
        go_on(settings, max_tokens=512, dry_run=False)
        with WorkerProcess(settings, tmp_path / "openai.log"):
            until(lambda: run.done() == run.batches(), what="refused rows")

    account = Accountant(run).account()
    [why] = go_on(settings, max_tokens=512, dry_run=True)["failed_before"]
    assert account.holds
    assert (account.truncated, account.failed) == (account.not_continued, 0)
    assert account.truncated > 0
    assert "(openai) takes no token ids, so no answer can go on there" in why


def test_a_conversation_whose_answer_was_cut_goes_on_with_its_following_turns(
    settings: Settings, storage: FileStorage, until: Until, tmp_path: Path
) -> None:
    content = {"target.model": "tiny", "sampling.max_tokens": CUT_AT, "producer.turns": "all"}
    run = Run.create(storage, "run", content, {})
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "A."}]
    messages = [*turns, {"role": "user", "content": "Two?"}]
    with FakeServer(model="tiny", tokenizer=str(TARGET), tokens=40, spread=0) as server:
        settings = changed(settings, worker__servers=[server.url], target__path=str(TARGET))
        enqueue(settings, run, [Prompt("0" * 32, "train", messages)])
        rows: list[int] = []
        with WorkerProcess(settings, tmp_path / "worker.log"):
            for _ in range(3):
                until(lambda: run.done() == run.batches(), what="an answer, or its end")
                rows.append(go_on(settings, max_tokens=512, dry_run=False)["rows"])

    [kept] = best(samples_of(run)).values()
    assert rows == [1, 1, 0]
    assert (kept.outcome, kept.ended, len(kept.turns), len(kept.messages)) == ("ok", None, 1, 3)
    assert kept.turns[0].ids_match_usage
    assert kept.ids_match_usage
    assert len(kept.turns[0].token_ids) > CUT_AT
    assert Accountant(run).account().holds
