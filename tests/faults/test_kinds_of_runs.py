"""Runs that ask more of a row than one answer: several samples, drawn thinking, every turn, answers that go on.

The fake server's answer depends on what it is asked alone. So what a run holds after its faults is compared, row by
row, with what the same run holds that met none: no answer may have come to another row or turn, or be half an answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftfleet.accounting import Accountant
from draftfleet.continuing import go_on
from draftfleet.embedded import Embedded
from draftfleet.outcomes import best
from draftfleet.queue import connect
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue
from draftfleet.verify import verify
from producer.produce import produce

Until = Callable[..., Any]

TARGET = Path(__file__).parents[2] / "examples/tiny-target"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WATERMARK_ROWS = 3 * 8
"""Of the batches that a worker holds that has rows of one in flight."""
DRAWN: dict[str, Any] = {
    "sampling.n": 4,
    "sampling.thinking_share": 0.5,
    "sampling.mixture": [{"weight": 2, "temperature": 1.0}, {"temperature": 0.2, "max_tokens": 200}],
}
PASSING = [
    {"kind": "status", "status": 503, "retry_after": "0", "share": 0.06},
    {"kind": "cut", "share": 0.06},
    {"kind": "abort", "share": 0.06},
    {"kind": "garbage", "share": 0.06},
    {"kind": "close", "share": 0.06},
]


def conversations(count: int, samples: int) -> list[Prompt]:
    """Of two turns, every third with tools; n samples of each stay together."""
    prompts: list[Prompt] = []
    for number in range(count):
        ask = [{"role": "user", "content": f"Question {number}, part {part}?"} for part in (1, 2)]
        messages = [ask[0], {"role": "assistant", "content": "The source's."}, ask[1]]
        one = Prompt(f"{number:032x}", "train", messages, tools=[TOOL] if number % 3 == 0 else None)
        prompts += [replace(one, sample=sample) for sample in range(samples)]
    return prompts


def held(run: Run) -> dict[str, tuple[Any, ...]]:
    """By row what it says, whoever made it and when."""
    samples = [sample for name in run.done() for sample in run.read_samples(name)]
    return {key: said(sample) for key, sample in best(samples).items()}


def said(one: Sample) -> tuple[Any, ...]:
    turns = [(turn.message, turn.prompt_token_ids, turn.token_ids) for turn in one.turns]
    answer = one.reasoning, one.content, one.prompt_token_ids, one.token_ids, one.finish_reason
    return one.outcome, one.drawn, one.messages, turns, one.ended, *answer


def assert_sound(run: Run, rows: int) -> None:
    account = Accountant(run).account()
    assert account.holds
    assert (account.ok + account.truncated, account.failed, account.pending, account.corrupt) == (rows, 0, 0, [])
    assert account.mismatched == 0
    assert verify(run).faults == []


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer(model="tiny", tokenizer=str(TARGET), tokens=24)) for _ in range(2)]


def answers(
    settings: Settings,
    storage: FileStorage,
    prompts: Sequence[Prompt],
    content: dict[str, Any],
    until: Until,
    log: Path,
) -> dict[str, tuple[Any, ...]]:
    """What the same run holds that met no fault."""
    run = Run.create(storage, "calm", content, {})
    enqueue(settings, run, prompts)
    with WorkerProcess(settings, log):
        until(lambda: run.done() == run.batches(), what="the run without faults")
    return held(run)


def test_whatever_fails_a_run_of_several_samples_drawn_thinking_and_every_turn_holds_what_it_would_have_held(
    quick: Settings,
    storage: FileStorage,
    redis_server: Embedded,
    servers: list[FakeServer],
    until: Until,
    tmp_path: Path,
) -> None:
    content = {"target.model": "tiny", "sampling.max_tokens": 256, "producer.turns": "all", **DRAWN}
    prompts = conversations(12, samples=4)
    one, other = servers
    settings = changed(
        quick,
        worker__servers=[one.url, other.url],
        worker__concurrency=3,
        worker__max_tries=20,
        target__path=str(TARGET),
    )
    expected = answers(settings, storage, prompts, content, until, tmp_path / "calm.log")

    run = Run.create(storage, "run", content, {})
    for server in servers:
        server.change(faults=PASSING, latency_s=0.05)
    enqueue(settings, run, prompts, batch_size=12)
    first, second = (WorkerProcess(settings, tmp_path / f"{name}.log") for name in ("first", "second"))
    with first:
        until(lambda: run.partials() or run.done(), what="finished rows")
        assert redis_server.process is not None
        redis_server.process.kill()
        one.change(model="another")
        until(lambda: first.said("another"), what="the other model to be seen")
        redis_server.start()
        one.change(model="tiny")
        first.send(signal.SIGKILL)
        first.wait()
    with second:
        until(lambda: second.said("batch taken"), what="a second holder")
        other.change(alive=False)
        until(lambda: second.said("waiting for server"), what="the dead server to be missed")
        other.change(alive=True)
        until(lambda: run.done() == run.batches(), what="the batches")

    assert held(run) == expected
    assert len(expected) == len(prompts)
    assert_sound(run, len(prompts))


def test_whatever_fails_while_cut_answers_go_on_they_become_what_they_were_cut_from(
    quick: Settings,
    storage: FileStorage,
    servers: list[FakeServer],
    make_prompts: Callable[..., list[Prompt]],
    until: Until,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(24)
    settings = changed(
        quick, worker__servers=[servers[0].url], worker__concurrency=3, worker__max_tries=20, target__path=str(TARGET)
    )
    whole = {"target.model": "tiny", "sampling.max_tokens": 512}
    expected = answers(settings, storage, prompts, whole, until, tmp_path / "calm.log")
    run = Run.create(storage, "run", whole | {"sampling.max_tokens": 12}, {})
    enqueue(settings, run, prompts)
    with WorkerProcess(settings, tmp_path / "cut.log"):
        until(lambda: run.done() == run.batches(), what="cut answers")
    cut = Accountant(run).account().truncated
    redis = connect(settings)

    servers[0].change(faults=[*PASSING, {"kind": "hang", "after": 11}])
    asked = go_on(settings, max_tokens=512, dry_run=False)
    twice = go_on(settings, max_tokens=512, dry_run=False)
    with WorkerProcess(settings, tmp_path / "first.log") as first:
        until(lambda: run.partials() and servers[0].stats()["in_flight"] >= 0, what="answers that went on")
        first.send(signal.SIGKILL)
        first.wait()
    midway = Accountant(run).account()
    redis.flushall()
    servers[0].change(faults=PASSING)
    with WorkerProcess(settings, tmp_path / "second.log"):
        until(lambda: run.done() == run.batches(), what="whole answers")

    assert (asked["rows"], twice["rows"], twice["left_out"]["being asked"]) == (cut, 0, cut)
    assert cut > 10
    assert (midway.holds, midway.pending) == (True, cut)
    assert_sound(run, len(prompts))
    assert {key: row[-2:] for key, row in held(run).items()} == {key: row[-2:] for key, row in expected.items()}


@pytest.mark.parametrize("every", [1, 2], ids=["whole batches", "parts of batches"])
def test_nothing_is_lost_or_doubled_where_workers_and_an_import_finish_the_same_rows(
    every: int, quick: Settings, storage: FileStorage, servers: list[FakeServer], until: Until, tmp_path: Path
) -> None:
    questions = [f"What is {number} times {number}?" for number in range(96)]
    data, paid = tmp_path / "questions.jsonl", tmp_path / "paid.jsonl"
    data.write_text("".join(json.dumps({"question": one}) + "\n" for one in questions))
    paid.write_text(
        "".join(json.dumps({"prompt": one, "completion": f"Paid: {one}"}) + "\n" for one in questions[8::every])
    )
    settings = changed(
        quick,
        worker__servers=[servers[0].url],
        worker__concurrency=4,
        target__path=str(TARGET),
        producer__data=str(data),
        producer__batch_size=8,
        sampling__max_tokens=256,
    )
    produce(settings, progress=False)
    run = Run.open(storage, "run")
    servers[0].fault("hang", after=1 + 12)
    with WorkerProcess(settings, tmp_path / "worker.log") as worker:
        until(lambda: worker.said("batch done") and run.partials(), what="a shard, and rows of the next")
        first = call_import(settings, paid)
        servers[0].clear()
        until(lambda: run.done() == run.batches(), what="all batches")
        until(lambda: not run.partials(), what="the partials to be deleted")
    again = call_import(settings, paid)

    samples = [sample for name in run.done() for sample in run.read_samples(name)]
    ours = sum(sample.server.startswith("imported:") for sample in samples)
    assert sorted(sample.row_key for sample in samples) == sorted({sample.row_key for sample in samples})
    assert (again["imported"], again["missing"]) == (0, 0)
    # What the worker held was not looked at again: of whole batches the import's shard came first, else it asked them.
    held_then = 0 if every == 1 else WATERMARK_ROWS // every
    assert first["imported"] - held_then <= ours <= first["imported"]
    assert_sound(run, 96)


def call_import(settings: Settings, paid: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "draftfleet", "import-data", str(paid), "--trust-text"]
    done = subprocess.run(
        command, env=os.environ | environment(settings), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
