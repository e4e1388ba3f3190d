"""Several samples of each prompt: a producer that is killed, that grows its run, and that is asked otherwise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from draftfleet import drawing
from draftfleet.accounting import Accountant
from draftfleet.errors import RunConflict
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import collect
from draftfleet.storage import FileStorage
from producer.produce import produce

Until = Callable[..., Any]
Configure = Callable[..., Settings]
Questions = Callable[..., list[str]]
Write = Callable[[Path, list[str]], Path]


def samples_per_prompt(run: Run) -> Counter[str]:
    """Of each prompt in the run; no row twice, and all samples of a prompt in one batch."""
    found = Counter[str]()
    for batch in run.batches():
        rows = run.read_prompts(batch)
        here = Counter(prompt.prompt_id for prompt in rows)
        assert len({prompt.row_key for prompt in rows}) == len(rows)
        assert not here.keys() & found.keys()
        found += here
    return found


def test_a_producer_killed_in_mid_run_leaves_no_prompt_with_some_of_its_samples(
    configure: Configure,
    storage: FileStorage,
    tmp_path: Path,
    until: Until,
    questions: Questions,
    write: Write,
    command: Callable[..., list[str]],
    flags: dict[str, Any],
) -> None:
    flags["sampling.n"] = 3
    lines = questions(300)
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    child = subprocess.Popen(command(pipe))
    with pipe.open("w") as file:
        file.writelines(lines[:150])
        file.flush()
        until(lambda: len(list(storage.list("run/prompts"))) > 5, what="batches of the child")
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    run = Run.open(storage, "run")
    killed = samples_per_prompt(run)

    report = produce(configure(write(tmp_path / "data.jsonl", lines)), progress=False)

    assert set(killed.values()) == {3}
    assert samples_per_prompt(run) == dict.fromkeys(samples_per_prompt(run), 3)
    assert (report.already, report.prompts, report.samples, report.run_samples) == (len(killed), 300, 900, 900)
    account = Accountant(run).account()
    assert (account.expected, account.pending, account.holds) == (900, 900, True)


def test_a_run_with_several_samples_grows_and_what_it_holds_is_known(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    few, more = write(tmp_path / "few.jsonl", questions(10)), write(tmp_path / "more.jsonl", questions(25))

    first = produce(configure(few, sampling__n=4), progress=False)
    again = produce(configure(few, sampling__n=4), progress=False)
    grown = produce(configure(more, sampling__n=4), progress=False)

    assert (first.new, first.samples, first.run_samples, first.duplicates) == (10, 40, 40, 0)
    assert (again.already_read, again.already, again.samples, again.run_samples) == (True, 10, 40, 40)
    assert (grown.new, grown.already, grown.samples, grown.run_prompts, grown.run_samples) == (15, 10, 100, 25, 100)
    assert (Run.open(storage, "run").sealed() or {})["samples"] == 100
    assert Accountant(Run.open(storage, "run")).account().holds


def test_another_number_of_samples_or_another_mixture_is_refused_by_name(
    configure: Configure, tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(5))
    produce(configure(data, sampling__n=2), progress=False)

    with pytest.raises(RunConflict, match=r"sampling\.n: the run has 2, now 3"):
        produce(configure(data, sampling__n=3), progress=False)
    with pytest.raises(RunConflict, match=r"sampling\.mixture: the run has \[\], now \[\{'weight': 1\.0"):
        produce(configure(data, sampling__n=2, sampling__mixture=[{"temperature": 1}]), progress=False)


def test_a_run_of_a_version_without_these_knobs_goes_on(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(5))
    produce(configure(data), progress=False)
    info = json.loads(storage.read("run/run.json"))
    young = ("n", "top_k", "min_p", "stop", "mixture", "thinking_share", "reasoning_effort")
    info["content"] = {k: v for k, v in info["content"].items() if k not in {f"sampling.{name}" for name in young}}
    storage.put("run/run.json", json.dumps(info).encode())
    sealed = Run.open(storage, "run").sealed() or {}
    Run.open(storage, "run").seal({k: v for k, v in sealed.items() if k not in ("samples", "drawn")})

    report = produce(configure(data), progress=False)

    assert (report.already, report.run_samples, report.drawn) == (5, 5, [])
    assert Accountant(Run.open(storage, "run")).account().expected == 5
    with pytest.raises(RunConflict, match=r"sampling\.n: the run has 1, now 2"):
        produce(configure(data, sampling__n=2), progress=False)


def test_status_tells_how_many_rows_are_asked_in_which_way(
    configure: Configure, client: redis.Redis, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(50))
    knobs = configure(data, sampling__n=2, sampling__thinking_share=0.5)
    produce(knobs, progress=False)
    run = Run.open(storage, "run")

    told = collect(knobs, Accountant(run))["drawn"]
    run.unseal()
    expected = collect(knobs, Accountant(run))["drawn"]
    shown = subprocess.run(
        [sys.executable, "-m", "draftfleet", "status", "--storage", knobs.storage.url, "--run", "run"],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, timeout=60, check=False,
    )  # fmt: skip

    rows = [prompt.row_key for batch in run.batches() for prompt in run.read_prompts(batch)]
    on = sum(drawing.drawn(knobs.sampling, key)[1]["thinking"] for key in rows)
    assert told == [
        {"thinking": True, "rows": on, "share": on / 100},
        {"thinking": False, "rows": 100 - on, "share": 1 - on / 100},
    ]
    assert [(way["thinking"], way["rows"], way["share"]) for way in expected] == [(True, None, 0.5), (False, None, 0.5)]
    assert "asked with thinking on 50.0%, thinking off 50.0%" in shown.stdout


def test_equal_samples_are_warned_of(
    configure: Configure, tmp_path: Path, questions: Questions, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(tmp_path / "data.jsonl", questions(3))

    produce(configure(data, sampling__n=2, sampling__temperature=0), progress=False)

    assert any("samples of a prompt will be equal" in message for message in caplog.messages)
