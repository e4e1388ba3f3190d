"""The scripts that made the tiny target and the demo's prompts still make them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = EXAMPLES / "tiny-target"
PROMPTS = EXAMPLES / "prompts" / "prompts.jsonl"


def run_script(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(TARGET / name), *arguments], check=True, timeout=240)


def questions(prompt: dict[str, Any]) -> set[str]:
    return {" ".join(turn["content"].casefold().split()) for turn in prompt["messages"] if turn["role"] == "user"}


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def test_the_shipped_prompts_are_what_their_script_makes(tmp_path: Path) -> None:
    run_script("make_prompts.py", "--out", str(tmp_path / "prompts.jsonl"))

    assert (tmp_path / "prompts.jsonl").read_bytes() == PROMPTS.read_bytes()


def test_there_are_enough_prompts_and_all_differ_and_end_with_a_question(prompts: list[dict[str, Any]]) -> None:
    splits = [prompt["split"] for prompt in prompts]

    assert splits.count("train") >= 1_500
    assert splits.count("heldout") >= 64
    assert len({json.dumps(prompt["messages"]) for prompt in prompts}) == len(prompts)
    assert all(prompt["messages"][-1]["role"] == "user" for prompt in prompts)
    assert PROMPTS.stat().st_size < 600_000


def test_no_heldout_question_is_asked_in_a_train_prompt(prompts: list[dict[str, Any]]) -> None:
    train = {question for prompt in prompts if prompt["split"] == "train" for question in questions(prompt)}
    heldout = {question for prompt in prompts if prompt["split"] == "heldout" for question in questions(prompt)}

    assert len(heldout) >= 64
    assert train.isdisjoint(heldout)


def test_pretraining_makes_a_model_of_the_shipped_shape_that_has_learned(tmp_path: Path) -> None:
    run_script("pretrain.py", "--out", str(tmp_path), "--steps", "40", "--num-conversations", "800", "--length", "64")

    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((TARGET / "config.json").read_text())
    assert (tmp_path / "chat_template.jinja").read_text() == (TARGET / "chat_template.jinja").read_text()
    made = json.loads((tmp_path / "training.json").read_text())
    uniform_loss = 7.6  # ln 2048
    assert made["history"][-1]["valid_loss"] < uniform_loss - 1
