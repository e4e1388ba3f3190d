"""The table of an evaluation, as it meets a person and a program."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from draftfleet import acceptance


def part(length: float, drafts: int) -> dict[str, Any]:
    return {
        "conversations": 12,
        "drafts": drafts,
        "acceptance_length": length,
        "interval": [length - 0.2, length + 0.2],
        "acceptance_per_position": [0.8, 0.61, 0.4],
    }


EVALUATION: dict[str, Any] = {
    "run": "demo",
    "drafter": "eagle3",
    "checkpoint": "step-001100",
    "k": 3,
    "temperature": 0.0,
    "prompts": 64,
    **part(2.813, 1922),
    "lossless": False,
    "lossless_prompts": 63,
    "speedup": 1.7,
    "sweep": [
        {"k": k, "acceptance_length": 1 + k / 2, "interval": None, "tokens_per_s": 100.4, "speedup": speedup}
        for k, speedup in ((1, 1.4), (3, 1.7))
    ],
    "domains": {"sums": part(2.7, 402)},
    "phases": {"thinking": part(3.02, 1240), "answer": part(2.42, 682)},
    "context": {"<512": part(2.813, 1922)},
    "turns": {},
    "teacher_forced": {"acceptance_length": 2.82, "is_alarming": True},
    "warnings": ["2.81 tokens per pass are accepted"],
}


def text(evaluation: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for one in acceptance.drawn(evaluation):
        console.print(one)
    return console.export_text()


def test_the_figure_comes_first_and_each_part_has_a_line() -> None:
    said = text(EVALUATION)

    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert lines[0] == "evaluated eagle3 of run demo, step-001100; k = 3, greedy, 64 prompts"
    assert lines[2] == "2.81 of at most 4 tokens per pass of the target 95 %: 2.61 - 3.01"
    assert "63 of 64 answers are those of the target alone, token for token" in lines
    assert "2.82 teacher-forced, of the same drafts: a gap" in lines
    assert "source sums 2.70 2.50 - 2.90 402 12 80 61 40" in lines
    assert "phase thinking 3.02 2.82 - 3.22 1,240 12 80 61 40" in lines
    assert "at token" not in said  # all of them: the first line says it
    assert "3 2.50 ? 100 1.70" in lines
    assert lines[-1] == "warning 2.81 tokens per pass are accepted"


def test_a_narrow_terminal_breaks_no_figure() -> None:
    said = text(EVALUATION, width=40)

    assert max(map(len, said.splitlines())) <= 40
    assert "2.50 - 2.90" in said


def test_sampled_answers_are_told_as_such() -> None:
    sampled = EVALUATION | {"temperature": 0.7, "lossless": None, "teacher_forced": None, "warnings": []}

    said = text(sampled | {"expected_acceptance_length": 2.79, "sweep": []})

    assert "sampled at temperature 0.7" in said
    assert "2.79 by sum min(p, q)" in said
    assert "token for token" not in said
    assert "times plain" not in said


@pytest.mark.parametrize("as_json", [True, False])
def test_a_program_gets_one_line(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    acceptance.show(EVALUATION, as_json=as_json)

    found = capsys.readouterr()
    assert json.loads(found.out) == EVALUATION
    assert found.out.count("\n") == 1
    assert bool(found.err) is not as_json
