"""Conversations, every turn asked by real worker processes: killed in the middle, failed, revived, trained on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from draftfleet import tokens
from draftfleet.accounting import Accountant
from draftfleet.outcomes import best
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.checks import assert_complete
from draftfleet.testing.workers import WorkerProcess, changed, enqueue
from draftfleet.tokens import TargetTokenizer
from draftfleet.training_rows import rows_of

Until = Callable[..., Any]

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = EXAMPLES / "tiny-target"
NUM_TURNS = 3

SHORT = {
    "claims__ttl_s": 1.5,
    "claims__renew_s": 0.3,
    "claims__sweep_s": 0.3,
    "claims__reconcile_s": 1,
    "claims__grace_s": 1,
    "worker__checkpoint_interval_s": 0.3,
    "worker__probe_interval_s": 0.2,
    "target__path": str(TARGET),
}


@pytest.fixture
def run(storage: FileStorage) -> Run:
    content = {"target.model": "tiny", "sampling.max_tokens": 256, "producer.turns": "all"}
    return Run.create(storage, "run", content, {})


@pytest.fixture(scope="module")
def tokenizer() -> TargetTokenizer:
    return tokens.load(TARGET)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(model="tiny", tokenizer=str(TARGET), tokens=24) as server:
        yield server


def conversations(count: int) -> list[Prompt]:
    found: list[Prompt] = []
    for number in range(count):
        messages: list[dict[str, Any]] = []
        for turn in range(NUM_TURNS):
            messages += [{"role": "user", "content": f"Question {number}, part {turn + 1}?"}]
            messages += [{"role": "assistant", "content": "The source's."}] if turn < NUM_TURNS - 1 else []
        found.append(Prompt(f"{number:032x}", "train", messages))
    return found


def samples_of(run: Run) -> list[Sample]:
    return [sample for name in run.done() for sample in run.read_samples(name)]


def num_turns_kept(run: Run) -> int:
    """Finished turns that stand in the storage: nobody has to ask them again."""
    partials = [sample for name in run.partials() for sample in run.read_partial(name)]
    kept = best([*samples_of(run), *partials]).values()
    return sum(len(sample.turns) + (sample.outcome != "unfinished") for sample in kept)


def assert_rows_are_what_the_target_saw(samples: list[Sample], tokenizer: TargetTokenizer) -> None:
    for row in [row for sample in samples for row in rows_of(sample)]:
        assert row.prompt_token_ids == tokenizer.prompt_ids(row.messages), row.key
        assert row.ids_match_usage
        assert (row.content or "") in tokenizer.decode(row.token_ids)
        assert all("The source's." not in str(message["content"]) for message in row.messages)


def test_after_kill_9_another_worker_goes_on_at_the_turn_that_was_in_flight(
    settings: Settings, run: Run, server: FakeServer, until: Until, tokenizer: TargetTokenizer, tmp_path: Path
) -> None:
    prompts = conversations(48)
    slots, latency_s, interval_s = 4, 0.1, SHORT["worker__checkpoint_interval_s"]
    server.change(latency_s=latency_s)
    settings = changed(settings, worker__servers=[server.url], worker__concurrency=slots, **SHORT)
    names = enqueue(settings, run, prompts, batch_size=12)

    def unfinished() -> list[Sample]:
        partials = [sample for name in run.partials() for sample in run.read_partial(name)]
        return [sample for sample in best(partials).values() if sample.outcome == "unfinished"]

    with WorkerProcess(settings, tmp_path / "first.log") as first:
        until(lambda: len(unfinished()) > 1 and server.stats()["requests"] > 16, what="conversations on the way")
        first.send(signal.SIGKILL)
        first.wait()
    before, kept = server.stats()["requests"] - 1, num_turns_kept(run)  # one canary
    server.change(latency_s=0)
    with WorkerProcess(settings, tmp_path / "second.log") as second:
        until(lambda: run.done() == names, what="all batches done")
    canaries = sum(len(worker.said("canary passed")) for worker in (first, second))
    again = server.stats()["requests"] - canaries - NUM_TURNS * len(prompts)

    assert 16 <= before < NUM_TURNS * len(prompts)
    assert again == before - kept
    # In flight: one turn per slot. Unsaved: what the slots finish in an interval, and in the time a write may take.
    assert again <= slots + slots * (interval_s + 1) / latency_s
    assert_complete(run, prompts)
    assert {len(rows_of(sample)) for sample in samples_of(run)} == {NUM_TURNS}
    assert_rows_are_what_the_target_saw(samples_of(run), tokenizer)


def test_a_turn_that_fails_costs_no_turn_before_it_and_reviving_asks_what_is_left(
    settings: Settings, run: Run, server: FakeServer, until: Until, tokenizer: TargetTokenizer, tmp_path: Path
) -> None:
    from draftfleet.settings import Trainer
    from trainer.data import START, Feed
    from trainer.team import Team

    prompts = conversations(8)
    accountant = Accountant(run)
    server.fault("status", status=422, contains="Question 3, part 2?")
    settings = changed(settings, worker__servers=[server.url], **SHORT)
    names = enqueue(settings, run, prompts)

    with WorkerProcess(settings, tmp_path / "worker.log"):
        until(lambda: run.done() == names, what="the batch")
        [failed] = [sample for sample in samples_of(run) if sample.outcome == "failed"]
        before = accountant.account()
        shown = status(settings)
        asked = server.stats()["requests"]
        server.clear()
        command = [sys.executable, "-m", "draftfleet", "dead", "revive", "--all"]
        subprocess.run(command, env=environment(settings), capture_output=True, timeout=60, check=True)
        until(lambda: not accountant.account().pending, what="the revived conversation")
        num_revived = server.stats()["requests"] - asked
    after = accountant.account()
    verify = [sys.executable, "-m", "draftfleet", "verify"]
    verified = subprocess.run(verify, env=environment(settings), capture_output=True, timeout=60, check=False)

    assert (len(failed.turns), failed.ended) == (1, "the target gave no answer at turn 2 of 3")
    assert (before.ok, before.failed, before.turns) == (7, 1, 7 * NUM_TURNS + 1)
    assert shown["ended"] == {"tool_calls": 0, "truncated": 0, "failed": 1}
    assert num_revived == NUM_TURNS - 1
    assert (after.ok, after.failed, after.turns, after.holds) == (8, 0, 8 * NUM_TURNS, True)
    assert status(settings)["ended"] == {"tool_calls": 0, "truncated": 0, "failed": 0}
    assert verified.returncode == 0, verified.stdout
    assert_rows_are_what_the_target_saw(list(best(samples_of(run)).values()), tokenizer)
    feed = Feed(run, Trainer(drafter="d", max_steps=1), tokenizer.vocab_size, Team.alone())
    first_epoch = takewhile(lambda step: step.then.epoch == 0, feed.steps(START, 1))
    rows = [row.key for step in first_epoch for batch in step.batches for row in batch]
    assert sorted(rows) == sorted(row.key for sample in best(samples_of(run)).values() for row in rows_of(sample))


def test_a_turn_that_the_context_has_no_room_for_is_not_asked_and_the_turns_before_it_stay(
    settings: Settings,
    storage: FileStorage,
    server: FakeServer,
    until: Until,
    tokenizer: TargetTokenizer,
    tmp_path: Path,
) -> None:
    content = {"target.model": "tiny", "sampling.max_tokens": 64, "producer.turns": "all"}
    run = Run.create(storage, "run", content, {})
    server.change(max_model_len=400, spread=0)
    prompts = conversations(8)
    long = [*prompts[2].messages[:-1], {"role": "user", "content": "and twice that " * 200}]
    prompts[2] = replace(prompts[2], messages=long)
    settings = changed(settings, worker__servers=[server.url], **SHORT)
    names = enqueue(settings, run, prompts)

    with WorkerProcess(settings, tmp_path / "worker.log") as worker:
        until(lambda: run.done() == names, what="the batch")
        canaries = len(worker.said("canary passed"))

    [full] = [sample for sample in samples_of(run) if sample.outcome == "failed"]
    assert (full.row_key, full.error_kind, len(full.turns)) == (prompts[2].row_key, "bad_request", NUM_TURNS - 1)
    assert full.error is not None
    assert "nothing is left for an answer" in full.error
    assert server.stats()["requests"] == NUM_TURNS * len(prompts) - 1 + canaries
    assert_complete(run, prompts, num_failed=1)
    assert_rows_are_what_the_target_saw(samples_of(run), tokenizer)


def test_a_server_that_tells_no_ids_gives_rows_of_every_turn_all_the_same(
    settings: Settings,
    storage: FileStorage,
    until: Until,
    tokenizer: TargetTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from inference_server import InferenceServer

    model = str(TARGET)
    content = {"target.model": model, "sampling.max_tokens": 256, "sampling.temperature": 0, "producer.turns": "all"}
    run = Run.create(storage, "run", content, {})
    prompts = [
        replace(prompt, messages=[{**one, "content": f"What is {number} + 4?"} for one in prompt.messages])
        for number, prompt in enumerate(conversations(4))
    ]
    with InferenceServer(model, tmp_path / "server.log") as server:
        until(lambda: server.check() or server.is_ready, what="the server")
        settings = changed(settings, worker__servers=[server.url], target__model=model, **SHORT)
        names = enqueue(settings, run, prompts)
        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="the batch", deadline_s=120)

    rows = [row for sample in samples_of(run) for row in rows_of(sample)]
    assert len(rows) == NUM_TURNS * len(prompts)
    assert {row.ids_source for row in rows} == {"retokenized"}
    assert all(row.reasoning for row in rows)
    for row in rows:
        assert row.prompt_token_ids == tokenizer.prompt_ids(row.messages)
    assert_complete(run, prompts)


def status(settings: Settings) -> dict[str, Any]:
    command = [sys.executable, "-m", "draftfleet", "status", "--json"]
    said = subprocess.run(command, env=environment(settings), capture_output=True, text=True, timeout=60, check=True)
    return json.loads(said.stdout)
