"""What a person and a program see of a pass."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer.produce import without_secrets

Questions = Callable[..., list[str]]
Write = Callable[[Path, list[str]], Path]
Command = Callable[..., list[str]]


def test_a_terminal_shows_how_far_it_is_and_a_log_file_does_not(
    tmp_path: Path, questions: Questions, write: Write, command: Command
) -> None:
    data = write(tmp_path / "data.jsonl", questions(50))
    terminal, end = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}

    shown = subprocess.run(
        command(data, progress=True), stdout=subprocess.PIPE, stderr=end, env=env, check=True, timeout=120
    )
    os.close(end)
    drawn = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    logged = subprocess.run(command(data, progress=True), capture_output=True, env=env, check=True, timeout=120)

    assert "100%" in drawn
    assert "50 lines" in drawn
    assert "50 prompts" in drawn
    assert json.loads(shown.stdout)["new"] == 50
    assert logged.stderr == b""


def test_the_command_shows_one_table_without_empty_rows_and_no_log_line(
    flags: dict[str, Any], tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(50))
    secret = {"DRAFTFLEET_QUEUE__URL": flags.pop("queue.url")}
    knobs = [text for key, value in flags.items() for text in ("--set", f"{key}={value}")]

    shown = subprocess.run(
        [sys.executable, "-m", "draftfleet", "produce", str(data), *knobs],
        env={**os.environ, **secret},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    first, *rows = shown.stderr.splitlines()
    assert first == "produced"
    assert [row for row in rows if not row.startswith("  ") or row.endswith("-")] == []
    assert "rejected for" not in shown.stderr
    assert json.loads(shown.stdout)["rejected_for"] == {}


@pytest.mark.parametrize(
    "secret",
    ["redis://:hunter2@host:6379/0", "queue.url=redis://me:hunter2@host", "worker.api_key=hunter2", "--token hunter2"],
)
def test_no_secret_of_the_command_line_reaches_run_json(secret: str) -> None:
    shown = without_secrets(["draftfleet", "produce", *secret.split(" "), "--run", "mine"])

    assert "hunter2" not in shown
    assert shown.endswith("--run mine")
