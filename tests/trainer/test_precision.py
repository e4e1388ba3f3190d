"""Both algorithms in the loop: master weights in float32, and steps whose tokens may be dealt out in any way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from trainer import checkpoint
from trainer.train import train

TINY = Path(__file__).parents[2] / "examples" / "tiny-target"


@pytest.fixture(params=["eagle3", "dflash"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


def settings(run: Run, **trainer: Any) -> Settings:
    knobs = {"batch_tokens": 96, "max_steps": 8, "log_steps": 1, "lr": 3e-3, "poll_s": 0.01, "device": "cpu"}
    small = {"dflash.num_layers": 1, "dflash.block_size": 4, "dflash.mask_token_id": 100}
    flags = {f"trainer.{name}": value for name, value in (knobs | trainer).items()}
    return load(flags={"run": run.name, "storage.url": run.storage.url, "target.path": str(TINY), **small, **flags})


def held(run: Run, drafter: str) -> checkpoint.Checkpoint:
    path = checkpoint.latest(run.drafter_dir(drafter))
    assert path is not None
    return checkpoint.read(path)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value.values() for tensor in tensors(one)] if isinstance(value, dict) else []


def losses(run: Run, drafter: str) -> list[float]:
    board = EventAccumulator(str(run.drafter_dir(drafter) / "tensorboard")).Reload()
    return [scalar.value for scalar in board.Scalars("loss")]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_in_bfloat16_weights_and_optimizer_stay_float32_and_the_loss_falls_as_in_float32(
    run: Run, samples: Any, algorithm: str, optimizer: str
) -> None:
    samples.put("train-000000", 3)  # few rows, which are learnt fast
    run.seal({})

    for dtype in ("float32", "bfloat16"):
        knobs = {"algorithm": algorithm, "optimizer": optimizer, "dtype": dtype, "drafter": dtype}
        assert train(settings(run, **knobs), threading.Event())

    half = held(run, "bfloat16")
    states = [tensor for tensor in tensors(half.optimizer) if tensor.numel() > 1]
    assert states
    assert {tensor.dtype for tensor in [*half.tensors.values(), *states]} == {torch.float32}
    whole = losses(run, "float32")
    assert losses(run, "bfloat16") == pytest.approx(whole, rel=0.05)
    assert losses(run, "bfloat16") != whole
    assert whole[-1] < whole[0]
    assert losses(run, "bfloat16")[-1] < losses(run, "bfloat16")[0]


def test_a_step_is_the_same_however_its_tokens_are_dealt_out(run: Run, samples: Any, algorithm: str) -> None:
    samples.prompts("train-000000", 3)
    rows = [samples.make("train-000000", str(n), token_ids=[3 + n] * n) for n in (28, 17, 6)]
    run.commit("train-000000", rows)
    run.seal({})

    moments = []
    for name, batch_tokens, accumulation in (("together", 90, 1), ("apart", 30, 3)):
        knobs = {"drafter": name, "batch_tokens": batch_tokens, "accumulation": accumulation, "clip": 1e9}
        assert train(settings(run, algorithm=algorithm, max_steps=1, **knobs), threading.Event())
        # The first moment of AdamW after one step is the gradient, times 0.1.
        states = held(run, name).optimizer["state"].values()
        moments.append(torch.cat([state["exp_avg"].flatten() for state in states]))

    torch.testing.assert_close(moments[0], moments[1], rtol=1e-4, atol=1e-6 * float(moments[0].abs().max()))
