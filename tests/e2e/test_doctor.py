"""`draftfleet doctor` as a person and a script meet it: a process, its text or JSON, and its exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftfleet.embedded import Embedded
from draftfleet.testing import FakeServer

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "examples/tiny-target"
WORD = "hippopotamus"
"""Stands in every prompt."""

DEADLINE_S = 120
Result = subprocess.CompletedProcess[str]


def inference_server(log: Path) -> Any:
    """That of the demo."""
    spec = importlib.util.spec_from_file_location("inference_server", ROOT / "examples/inference_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.InferenceServer(str(TARGET), log)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {i} times a {WORD}?"}) + "\n" for i in range(20)))
    return path


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(model="tiny", tokenizer=str(TARGET), max_model_len=1024) as server:
        yield server


@pytest.fixture
def call(tmp_path: Path, redis_server: Embedded) -> Callable[..., Result]:
    """The verb in an empty folder, with a Redis that is well."""

    def start(*args: object, verb: str = "doctor") -> Result:
        return subprocess.run(
            [sys.executable, "-m", "draftfleet", verb, *map(str, args)],
            cwd=tmp_path,
            env=os.environ | {"DRAFTFLEET_QUEUE__URL": redis_server.url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    return start


@pytest.fixture
def sound(data: Path, server: FakeServer, tmp_path: Path) -> list[object]:
    (tmp_path / "storage").mkdir()
    flags = ["--target", TARGET, "--max-tokens", 256, "--set", "storage.min_free_gb=0"]
    return [data, "--servers", server.url, "--model", "tiny", "--storage", tmp_path / "storage", *flags]


def wrong(stdout: str) -> list[str]:
    """The lines of faults and warnings. The node of the tests may have workers of others, whom no test can end."""
    lines = [line for line in stdout.splitlines() if line.startswith(("fault ", "warning "))]
    return [line for line in lines if "processes  this node:" not in line]


def test_where_all_is_well_it_ends_with_0_and_a_line_for_each_thing(
    call: Callable[..., Result], sound: list[object]
) -> None:
    result = call(*sound)

    assert result.returncode == 0, result.stdout
    assert result.stderr == ""
    assert wrong(result.stdout) == []
    assert "\x1b" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("0 faults, ")
    assert {line.split()[0] for line in result.stdout.splitlines()[:-1] if line} <= {"ok", "skipped", "warning"}


def test_a_real_server_without_ids_is_well(call: Callable[..., Result], sound: list[object], tmp_path: Path) -> None:
    """`transformers serve` gives no ids and no gauges, and names its model by its folder."""
    with inference_server(tmp_path / "serve.log") as server:
        deadline = time.monotonic() + DEADLINE_S
        while not server.is_ready:
            server.check()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        result = call(sound[0], *sound[5:], "--servers", server.url, "--model", TARGET, "--json")

    report: dict[str, Any] = json.loads(result.stdout)
    faults = [one for one in report["findings"] if one["level"] == "fault"]
    assert faults == []
    assert result.returncode == 0
    assert report["seconds"] < 60
    assert {record["ids_source"] for record in report["canary"]} == {"retokenized"}
    assert {record["reasoning_source"] for record in report["canary"]} == {"reasoning_content"}
    [ids] = [one for one in report["findings"] if (one["subject"], one["check"]) == ("tokenizer", "ids")]
    assert ids["values"]["by"] == "counts"


def test_what_is_worst_stands_first_with_what_to_do(call: Callable[..., Result], sound: list[object]) -> None:
    result = call(*sound, "--model", "large", "--set", "producer.heldout=0")

    first, second = wrong(result.stdout)
    assert result.returncode == 1
    assert first.startswith("fault    servers")
    assert "serves 'tiny', and 'large' is asked for -> start it with that model" in first
    assert second.startswith("warning  settings")
    assert second.endswith("unless a column `split` of the data says it")


def test_a_warning_ends_with_1_only_where_it_is_to_be_strict(call: Callable[..., Result], sound: list[object]) -> None:
    warned = [*sound, "--set", "producer.heldout=0"]

    assert call(*warned).returncode == 0
    assert call(*warned, "--strict").returncode == 1


def test_prompts_are_shown_where_they_are_asked_for(call: Callable[..., Result], sound: list[object]) -> None:
    plain, shown, as_json = call(*sound), call(*sound, "--show"), call(*sound, "--json")

    assert WORD not in plain.stdout + plain.stderr
    assert shown.stdout.count(f"times a {WORD}?") == 8
    report: dict[str, Any] = json.loads(as_json.stdout)
    assert as_json.stdout.count("\n") == 1
    assert report["counts"]["fault"] == report["exit_code"] == 0
    assert len(report["canary"]) == 8
    for record in report["canary"]:
        assert record["ids_match"] is True
        assert record["ids_source"] == "engine"
        assert record["ids"] == record["completion_tokens"]
        assert record["reasoning_source"] == "reasoning"
        assert record["finish_reason"] == "stop"
        assert record["reasoning"]
        assert record["content"]


def test_settings_that_cannot_be_read_are_a_finding(call: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "draftfleet.toml").write_text("[worker]\nserver = []\n")

    result, as_json = call(), call("--json")

    assert result.returncode == 1
    first = result.stdout.splitlines()[0]
    assert first.startswith("fault    settings")
    assert "unknown key worker.server; did you mean worker.servers?" in first
    report = json.loads(as_json.stdout)
    assert {one["level"] for one in report["findings"] if one["subject"] != "settings"} == {"skipped"}


def test_the_settings_file_that_was_read_is_named(
    call: Callable[..., Result], sound: list[object], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text("[producer]\nbatch_size = 8\n")

    result = call(*sound, "--config", "mine.toml")

    assert "settings   file: mine.toml" in result.stdout


def test_an_existing_run_is_compared_as_produce_would(call: Callable[..., Result], sound: list[object]) -> None:
    produced = call(*sound[:1], *sound[3:], verb="produce")
    assert produced.returncode == 0, produced.stderr

    same, other = call(*sound), call(*sound, "--max-tokens", 100)

    assert "ok       run        settings of the run: the same as default pins" in same.stdout
    assert "ok       run        fleet:" in same.stdout
    assert "sampling.max_tokens: the run has 256, now 100" in other.stdout
    assert (same.returncode, other.returncode) == (0, 1)
