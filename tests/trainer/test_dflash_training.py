"""DFlash in the training loop: held-out acceptance rises, a resumed training is the same one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draftfleet import tokens
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer import checkpoint, targets
from trainer.algorithms.dflash.algorithm import DFlash
from trainer.evaluate import evaluate
from trainer.speculate import Limits, decode_batch
from trainer.targets import Captured
from trainer.targets.hf import HfTarget
from trainer.train import train

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
NUMBERS = [(a, b) for a in range(2, 42, 4) for b in (3, 5, 8)]


def settings_for(folder: Path, **knobs: Any) -> Settings:
    flags = {
        "storage.url": str(folder),
        "run": "sums",
        "target.path": TINY,
        "trainer.drafter": "d",
        "trainer.algorithm": "dflash",
        "trainer.device": "cpu",
        "trainer.batch_tokens": 384,
        "trainer.lr": 3e-3,
        "trainer.warmup": 0.1,
        "trainer.clip": 1.0,
        "trainer.max_steps": 50,
        "trainer.checkpoint_steps": 30,
        "dflash.num_layers": 1,
        "dflash.block_size": 4,
        "dflash.anchors": 12,
        "evaluation.k": 3,
        "evaluation.max_tokens": 24,
        "evaluation.prompts": 2,
    }
    return load(flags=flags | {name.replace("__", "."): value for name, value in knobs.items()})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, answered by the tiny target: the last four held out."""
    folder = tmp_path_factory.mktemp("storage")
    run = Run.create(open_storage(str(folder)), "sums", {"sampling.thinking": True, "sampling.extra_body": {}}, {})
    target: Any = targets.load(load(flags={"target.path": TINY}), [1], torch.device("cpu"))
    tokenizer = tokens.load(TINY)
    asked = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in NUMBERS]
    prompts = [tokenizer.prompt_ids(messages, None, True, None) for messages in asked]
    answers = decode_batch(target, prompts, Limits(64, 1024))
    for batch, split, part in (("train-000000", "train", slice(0, -4)), ("heldout-000000", "heldout", slice(-4, None))):
        rows = list(zip(asked, prompts, answers, strict=True))[part]
        run.write_prompts(batch, [Prompt(f"{batch}-{n}", split, messages) for n, (messages, _, _) in enumerate(rows)])
        run.commit(
            batch,
            [
                Sample(
                    run_id=run.run_id, run=run.name, batch=batch, row_key=f"{batch}-{n}", prompt_id=f"{batch}-{n}",
                    split=split, messages=messages, outcome="ok", prompt_token_ids=prompt, token_ids=answer,
                    ids_source="engine", completion_tokens=len(answer),
                )
                for n, (messages, prompt, answer) in enumerate(rows)
            ],
        )  # fmt: skip
    run.seal({})
    return folder


def test_held_out_acceptance_rises_and_every_answer_stays_the_targets(made: Path) -> None:
    settings = settings_for(made)
    home = Run.open(open_storage(str(made)), "sums").drafter_dir("d")

    first = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"max_steps": 2})})
    assert train(first, threading.Event())
    early = evaluate(first, progress=False)
    (home / "drafter-settings.json").unlink()  # it pins the number of steps
    assert train(settings, threading.Event())
    late = evaluate(settings, progress=False)

    assert (early.checkpoint, late.checkpoint) == ("step-000002", "step-000050")
    assert early.lossless
    assert late.lossless
    assert late.acceptance_length > early.acceptance_length + 0.6
    assert len(late.acceptance_per_position) == 3
    progress = json.loads((home / "progress.json").read_text())
    assert len(progress["accuracy"]) == 3
    assert 0.5 < progress["accuracy"][0] <= 1
    config = checkpoint.read(home / "checkpoints/step-000050").config
    assert (config.layers, config.block_size, config.mask_token_id, config.style) == ([1, 2, 3, 4, 5], 4, 0, "qwen3")


def test_a_resumed_training_draws_the_same_anchors_and_ends_with_the_same_bits(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Run.open(open_storage(str(made)), "sums").drafter_dir
    steps = {"trainer__max_steps": 14, "trainer__checkpoint_steps": 4}
    drawn: dict[str, set[tuple[int, ...]]] = {}

    class Listening(DFlash):
        def collate(self, captured: list[Captured]) -> Any:
            layout = super().collate(captured)
            assert layout is not None
            for one, anchors in zip(captured, layout.anchors, strict=True):
                drawn.setdefault(one.row.key, set()).add(tuple(anchors.tolist()))
            return layout

    monkeypatch.setattr("trainer.algorithms.dflash.DFlash", Listening)
    assert train(settings_for(made, trainer__drafter="whole", **steps), threading.Event())
    epochs = {len(anchors) for anchors in drawn.values()}
    stop = threading.Event()
    halves = settings_for(made, trainer__drafter="halves", **steps)
    capture = HfTarget.capture

    def cut_short(self: HfTarget, batches: Any) -> Any:
        for number, captured in enumerate(capture(self, batches)):
            if number == 6:
                stop.set()
            yield captured

    monkeypatch.setattr(HfTarget, "capture", cut_short)
    assert not train(halves, stop)
    monkeypatch.setattr(HfTarget, "capture", capture)
    assert train(halves, threading.Event())

    whole, resumed = (checkpoint.read(home(name) / "checkpoints/step-000014") for name in ("whole", "halves"))
    assert min(epochs) > 1  # each row is cut anew in each epoch
    assert whole.tensors.keys() == resumed.tensors.keys()
    assert all(torch.equal(whole.tensors[name], resumed.tensors[name]) for name in whole.tensors)
    assert whole.state == resumed.state
