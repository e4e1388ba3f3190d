"""`draftfleet bench` as a person and a script meet it: a process, its table or JSON, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.testing import FakeServer

from .conftest import DRAFTING, TIMES

Result = subprocess.CompletedProcess[str]
QUICK = ("--concurrency", "1,2", "--limit", "2", "--repeat", "1", "--max-tokens", "16")


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "draftfleet", "bench", *map(str, args)]


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Result]:
    def start(*args: object) -> Result:
        return subprocess.run(command(*args), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    return start


def test_a_table_for_a_person(
    call: Callable[..., Result], start: Callable[..., FakeServer], settings: Settings
) -> None:
    one, other = start(**DRAFTING, **TIMES), start(**TIMES)

    result = call("--with", one.url, "--without", other.url, "--run", "run", "--storage", settings.storage.url, *QUICK)

    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert "tiny, vllm, median of 1" in result.stdout
    assert [line[:2] for line in lines if line and line[0].isdigit()] == [
        ["1", "with"], ["1", "without"], ["2", "with"], ["2", "without"],
    ]  # fmt: skip
    assert "by the server's counters" in result.stdout
    assert "equal answers: 2 of 2 at 1, 4 of 4 at 2" in result.stdout
    assert max(map(len, result.stdout.partition("acceptance")[0].splitlines())) <= 80
    assert "…" not in result.stdout


def test_json_for_a_program_with_prompts_of_a_file_and_no_run(
    call: Callable[..., Result], start: Callable[..., FakeServer], tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Why {i}?"}) + "\n" for i in range(9)))

    result = call("--with", start(**DRAFTING).url, "--prompts", "prompts.jsonl", "--json", "--storage", "data", *QUICK)

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["prompts_from"] == "prompts.jsonl"
    assert [level["concurrency"] for level in report["levels"]] == [1, 2]
    assert report["acceptance"]["acceptance_per_position"] == sorted(
        report["acceptance"]["acceptance_per_position"], reverse=True
    )
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


def test_a_server_that_ends_leaves_the_figures_until_then_and_an_exit_code(
    call: Callable[..., Result], start: Callable[..., FakeServer], settings: Settings
) -> None:
    server = start(**DRAFTING)
    server.fault("die", after=1 + 2 + 2 + 1)

    result = call("--with", server.url, "--run", "run", "--storage", settings.storage.url, *QUICK)

    assert result.returncode == 7
    assert "it ended early: the connection to server" in result.stdout
    assert "draftfleet: the connection to server" in result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines() if " with " in line] == ["1"]


def test_an_interrupt_leaves_the_figures_until_then(
    start: Callable[..., FakeServer], settings: Settings, run: Run, tmp_path: Path, until: Callable[..., object]
) -> None:
    server = start(**DRAFTING)
    server.fault("hang", after=1 + 2 + 2)
    args = command("--with", server.url, "--run", "run", "--storage", settings.storage.url, *QUICK)
    process = subprocess.Popen(args, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: server.stats()["faults"].get("hang"))

    os.kill(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=30)

    assert process.returncode == 130, errors
    assert "it ended early: it was interrupted" in said
    assert json.loads(run.storage.read("run/drafters/eagle3/bench.json"))["error"] == "it was interrupted"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--with", "http://127.0.0.1:1", "--concurrency", "one"], 2, "--concurrency one: numbers with commas"),
        (["--with", "http://127.0.0.1:1", "--without", "http://127.0.0.1:1"], 2, "are both http://127.0.0.1:1"),
        (["--with", "http://127.0.0.1:1"], 3, "there is no run default"),
        (["--with", "http://127.0.0.1:1", "--prompts", "absent.jsonl"], 3, "absent.jsonl"),
    ],
)
def test_what_makes_no_sense_is_told(call: Callable[..., Result], args: list[str], code: int, said: str) -> None:
    result = call(*args)

    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
