"""Samples of another model are refused by what their ids spell."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from draftfleet import tokens
from draftfleet.errors import TargetError
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import load
from trainer.spelling import Spelling
from trainer.train import train

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
TEXT = "Three apples and four pears."


def spelled(samples: Any, key: str, shift: int = 0, **changes: Any) -> Sample:
    """An answer as its server gave it, with ids moved by `shift`, as those of another tokenizer are."""
    prompt = tokens.load(TINY).prompt_ids([{"role": "user", "content": TEXT}], None, False, None)
    ids = [(token + shift) % 2048 for token in prompt]  # the rendered prompt holds the text as well
    return samples.make("train-000000", key, token_ids=ids, content=f" {TEXT} ", **changes)


def test_samples_whose_ids_spell_their_text_pass(samples: Any) -> None:
    Spelling(TINY).check([spelled(samples, "other", shift=7), spelled(samples, "own")])


def test_only_the_first_samples_with_a_text_are_looked_at(samples: Any) -> None:
    spelling = Spelling(TINY)

    spelling.check([samples.make("train-000000", "no text"), spelled(samples, "failed", shift=7, outcome="failed")])
    spelling.check([spelled(samples, "own")])
    spelling.check([spelled(samples, "other", shift=7)])


def test_a_target_without_a_tokenizer_is_not_checked_and_that_is_said(
    samples: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Spelling(str(tmp_path)).check([spelled(samples, "other", shift=7)])

    assert "spelling of samples not checked" in caplog.text


def test_a_training_on_the_samples_of_another_model_is_refused(run: Run, samples: Any) -> None:
    keys = samples.prompts("train-000000", 2)
    run.commit("train-000000", [spelled(samples, key, shift=7) for key in keys])
    settings = load(flags={
        "storage.url": run.storage.url, "run": run.name, "target.path": TINY, "trainer.max_steps": 1,
        "trainer.device": "cpu",
    })  # fmt: skip

    with pytest.raises(TargetError, match=r"2 samples do not spell their text .*tiny-target, sample train-000000-row0"):
        train(settings, threading.Event())
