"""A run of which a part was paid for elsewhere: the verb, as a process, then a real worker that asks only the rest."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftfleet import tokens
from draftfleet.accounting import Accountant
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed
from draftfleet.verify import verify
from producer.produce import produce

Until = Callable[..., Any]

TARGET = Path(__file__).parents[2] / "examples" / "tiny-target"
QUESTIONS = [f"What is {number} times {number}?" for number in range(200)]

KILLED = """
import os, signal, sys
from draftfleet.runs import Run

left = int(sys.argv.pop(1))

def counted(write):
    def do(*args):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)
    return do

Run.commit, Run.write_partial = counted(Run.commit), counted(Run.write_partial)
from draftfleet.cli import main
main()
"""
"""The command line, which a kill -9 ends when it is about to write its so manieth file into the run."""


@pytest.fixture
def run(settings: Settings, storage: FileStorage, tmp_path: Path) -> Run:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": question}) + "\n" for question in QUESTIONS))
    asking = {"producer__batch_size": 8, "sampling__max_tokens": 256}
    produce(knobs(settings, producer__data=str(data), **asking), progress=False)
    return Run.open(storage, "run")


@pytest.fixture
def paid(tmp_path: Path) -> list[Path]:
    """Answers to the first 64 questions, so that batches get whole, and to every other one of the next 112."""
    tokenizer = tokens.load(TARGET)
    answers = {question: f"It is {number * number}." for number, question in enumerate(QUESTIONS)}
    wanted = [*QUESTIONS[:64], *QUESTIONS[64:176:2]]
    specforge, responses, datatrove = wanted[0::3], wanted[1::3], wanted[2::3]

    first = tmp_path / "regenerated.jsonl"
    first.write_text("".join(as_lines(_specforge(question, answers[question]) for question in specforge)))
    ids = {question: tokenizer.encode(answers[question] + tokenizer.end_of_turn) for question in responses}
    rows = [{"prompt": one, "completion": answers[one], "token_ids": ids[one]} for one in responses]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "responses.parquet")
    folder = tmp_path / "datatrove"
    folder.mkdir()
    for shard in range(2):
        lines = as_lines(_datatrove(question, answers[question]) for question in datatrove[shard::2])
        (folder / f"0000{shard}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return [first, tmp_path / "responses.parquet", folder]


def test_a_worker_asks_exactly_what_was_not_imported(
    settings: Settings, run: Run, paid: list[Path], until: Until, tmp_path: Path
) -> None:
    said = imported(settings, paid)
    account = Accountant(run).account()
    begun = {sample.row_key: sample for sample in stored(run)}
    assert (said["imported"], said["missing"], said["malformed"]) == (120, 80, 0)
    assert said["forms"] == {"specforge": 40, "responses": 40, "datatrove": 40}
    assert (account.expected, account.rows, account.holds) == (200, 200, True)
    assert len(begun) == 120

    with FakeServer(model="tiny", tokenizer=str(TARGET)) as server:
        working = knobs(settings, worker__servers=[server.url], worker__concurrency=8)
        with WorkerProcess(working, tmp_path / "worker.log") as worker:
            until(lambda: Accountant(run).account().pending == 0, what="all rows")
            until(lambda: run.partials() == [], what="no partials left")
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0
        asked = {text: row["requests"] for text, row in server.stats()["rows"].items()}

    account = Accountant(run).account()
    samples = {sample.row_key: sample for sample in stored(run)}
    missing = {str(one.messages[-1]["content"]) for one in samples.values() if one.row_key not in begun}
    assert (account.ok, account.failed, account.pending, account.mismatched, account.holds) == (200, 0, 0, 0, True)
    assert len(missing) == 80
    assert missing <= set(asked)
    assert sum(asked.values()) <= 80 + 2, "the canary asks one prompt more"
    assert all(samples[key].content == sample.content for key, sample in begun.items())
    assert {sample.server for sample in samples.values()} == {
        server.url,
        *(
            f"imported:{name}"
            for name in ("regenerated.jsonl", "responses.parquet", "00000.jsonl.gz", "00001.jsonl.gz")
        ),
    }
    assert verify(run).faults == []


@pytest.mark.parametrize("at", [1, 4, 17])
def test_an_import_killed_midway_is_completed_by_the_next_and_nothing_is_doubled(
    settings: Settings, run: Run, paid: list[Path], at: int
) -> None:
    killed = call(settings, paid, python=["-c", KILLED, str(at)])
    before = stored(run)
    assert killed.returncode == -signal.SIGKILL

    said = imported(settings, paid)
    again = imported(settings, paid)

    after = {sample.row_key: sample for sample in stored(run)}
    assert len(before) < 120
    assert (len(after), said["imported"], said["already"]) == (120, 120 - len(before), len(before))
    assert (again["imported"], again["already"], again["missing"]) == (0, 120, 80)
    assert all(after[sample.row_key].content == sample.content for sample in before)
    assert Accountant(run).account().holds
    assert verify(run).faults == []


def test_the_verb_stops_where_a_person_has_to_decide(settings: Settings, run: Run, paid: list[Path]) -> None:
    asked = call(settings, paid, flags=[])
    dry = call(settings, paid, flags=["--dry-run"])

    assert asked.returncode == 2
    assert "--trust-text" in asked.stderr
    assert "Traceback" not in asked.stderr
    assert json.loads(dry.stdout)["imported"] == 120
    assert "will want --trust-text or --no-trust-text rows=80" in dry.stderr
    assert "\nwould import" in dry.stderr
    assert stored(run) == []


def imported(settings: Settings, paid: Sequence[Path]) -> dict[str, Any]:
    done = call(settings, paid)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def call(
    settings: Settings,
    paid: Sequence[Path],
    *,
    python: Sequence[str] = ("-m", "draftfleet"),
    flags: Sequence[str] = ("--trust-text",),
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "import-data", *map(str, paid), *flags],
        env=os.environ | environment(knobs(settings)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def stored(run: Run) -> list[Sample]:
    """All that stand in shards and in partials of batches without one. Fails if a row is there twice."""
    done = run.done()
    found = [sample for batch in done for sample in run.read_samples(batch)]
    found += [one for name in run.partials() for one in run.read_partial(name) if one.batch not in done]
    assert len({sample.row_key for sample in found}) == len(found)
    return found


def knobs(settings: Settings, **others: Any) -> Settings:
    return changed(settings, target__path=str(TARGET), **others)


def as_lines(rows: Iterator[dict[str, Any]]) -> list[str]:
    return [json.dumps(row) + "\n" for row in rows]


def _specforge(question: str, answer: str) -> dict[str, Any]:
    conversation = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"id": question, "conversations": conversation, "status": "success"}


def _datatrove(question: str, answer: str) -> dict[str, Any]:
    rollout = {"text": answer, "finish_reason": "stop", "usage": {}, "reasoning": ""}
    return {"text": question, "id": "train/0", "metadata": {"rollout_results": [rollout]}}
