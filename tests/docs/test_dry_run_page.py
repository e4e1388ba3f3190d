"""What the page of the dry run shows is what the command prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from draftfleet.settings import load
from producer.preview.dry_run import MEASURED_PROMPTS, SHOWN_PROMPTS, show
from producer.preview.evidence import ENOUGH_ROWS
from producer.preview.lengths import WAITING_CHARS
from producer.preview.rendered import MOST_CHARACTERS
from producer.preview.work import RATES, USUAL_TOKENS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/dry-run.md").read_text()


def block(kind: str) -> str:
    [found] = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


def test_the_command_prints_what_the_page_shows() -> None:
    _, *arguments = shlex.split(block("bash"))

    result = subprocess.run(
        [sys.executable, "-m", "draftfleet", *arguments],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert result.stdout == block("text")


def test_every_turn_is_shown_as_the_page_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "row.jsonl").write_text(block("json row"))
    flags = {
        "producer.data": str(tmp_path / "row.jsonl"),
        "producer.turns": "all",
        "target.path": str(ROOT / "examples/tiny-target"),
        "sampling.max_tokens": 64,
    }

    show(load(flags=flags), as_json=False, progress=False)

    assert block("text every turn") in capsys.readouterr().out


def test_the_numbers_of_the_page_are_those_of_the_program() -> None:
    assert f"more than {MEASURED_PROMPTS:,} prompts" in PAGE
    assert SHOWN_PROMPTS == 3  # "three where nothing is said"
    assert f"the mean of {ENOUGH_ROWS} or more answers" in PAGE
    assert f"else {USUAL_TOKENS:,}, or `sampling.max_tokens`" in PAGE
    assert "a table for {:,.0f}, {:,.0f} and {:,.0f}".format(*RATES) in PAGE
    assert f"at most {WAITING_CHARS // 10**6} million characters" in PAGE
    assert f"more than {MOST_CHARACTERS:,} characters" in PAGE
