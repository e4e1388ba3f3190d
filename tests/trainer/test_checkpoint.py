"""Checkpoints: whole or not there, the latest few kept, and an exact resume."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftfleet.errors import DrafterError, RunBusy, StorageUnwritable
from draftfleet.runs import Run
from draftfleet.settings import Trainer
from trainer import checkpoint
from trainer.batches import ORDER
from trainer.checkpoint import State
from trainer.data import Journal, Position
from trainer.team import Team
from trainer.train import fit


def write(folder: Path, step: int, keep: int = 2, **changes: Any) -> Path:
    weight = torch.nn.Parameter(torch.full((2, 3), float(step)))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    return checkpoint.write(
        folder,
        config=changes.pop("config"),
        tensors={"weight": weight},
        state=State(step=step, tokens=step * 10, trained_tokens=step, position=Position(0, 1, step)),
        optimizer=optimizer.state_dict(),
        journal=Journal([["train-000000"], ["train-000001", "train-000002"]], complete=True),
        keep=keep,
        **changes,
    )


@pytest.fixture
def config(toy_algorithm: Callable[[], Any]) -> Any:
    return toy_algorithm().config


def test_a_checkpoint_reads_back_as_it_was_written(tmp_path: Path, config: Any) -> None:
    torch.manual_seed(3)
    random.seed(3)
    path = write(tmp_path, 200, config=config)
    drawn = torch.rand(4), random.random()

    held = checkpoint.read(path)
    held.random.restore()

    assert path == checkpoint.latest(tmp_path) == tmp_path / "checkpoints/step-000200"
    assert held.config == config
    assert held.state == State(step=200, tokens=2000, trained_tokens=200, position=Position(0, 1, 200))
    assert held.journal == Journal([["train-000000"], ["train-000001", "train-000002"]], complete=True)
    assert held.optimizer["state"][0]["exp_avg"].abs().sum() > 0
    assert torch.equal(torch.rand(4), drawn[0])
    assert random.random() == drawn[1]


def test_only_the_latest_few_stay(tmp_path: Path, config: Any) -> None:
    for step in (5, 10, 15, 20):
        write(tmp_path, step, keep=2, config=config)

    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000015", "step-000020"]


@pytest.mark.parametrize("name", ["drafter.json", "drafter.safetensors", "state.pt", "journal.json"])
@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_torn_checkpoint_is_left_out(tmp_path: Path, config: Any, name: str, damage: str) -> None:
    older = write(tmp_path, 5, config=config)
    torn = write(tmp_path, 10, config=config) / name
    content = torn.read_bytes()
    torn.unlink() if damage == "missing" else torn.write_bytes(content[: len(content) // 2])

    assert checkpoint.latest(tmp_path) == older


def test_a_torn_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path, config: Any) -> None:
    write(tmp_path, 5, config=config)
    (write(tmp_path, 10, config=config) / "state.pt").unlink()

    again = write(tmp_path, 10, config=config)

    assert checkpoint.latest(tmp_path) == again


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None


def test_a_checkpoint_that_may_not_be_put_leaves_nothing_behind(tmp_path: Path, config: Any) -> None:
    with pytest.raises(RunBusy, match="another trainer"):
        write(tmp_path, 5, config=config, may_put=lambda: False)

    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_writer_that_was_killed_leaves_the_checkpoint_before_it(tmp_path: Path, config: Any) -> None:
    older = write(tmp_path, 5, config=config)
    script = (
        "import os, signal, sys, torch; from pathlib import Path; from trainer import checkpoint;"
        "from trainer.data import Journal; from trainer.drafter import load;"
        f"config, tensors = load(Path({str(older)!r}));"
        f"checkpoint.write(Path({str(tmp_path)!r}), config=config, tensors=tensors,"
        " state=checkpoint.State(step=10), optimizer={}, journal=Journal(), keep=2,"
        " may_put=lambda: os.kill(os.getpid(), signal.SIGKILL))"
    )

    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)

    assert killed.returncode == -signal.SIGKILL
    assert any(path.name.startswith(".step-000010") for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoint.latest(tmp_path) == older
    write(tmp_path, 10, config=config)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000005", "step-000010"]


@pytest.mark.parametrize("limit_bytes", [500, 100_000], ids=["before the optimizer", "within it"])
def test_a_full_folder_is_said_so_and_the_checkpoint_before_it_stays(
    tmp_path: Path, config: Any, limit_bytes: int
) -> None:
    older = write(tmp_path, 5, config=config)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(StorageUnwritable, match="Make room"):
            checkpoint.write(
                tmp_path, config=config, tensors={"weight": torch.ones(2)}, state=State(step=10),
                optimizer={"moments": torch.zeros(100_000)}, journal=Journal(), keep=2,
            )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)

    assert checkpoint.latest(tmp_path) == older
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000005"]


def stop_at(target: Any, batch: int) -> threading.Event:
    """A stop flag that is set while the target captures its n-th batch from now: a signal at a known step."""
    stop, already = threading.Event(), len(target.seen)
    target.on_batch = lambda count: stop.set() if count == already + batch else None
    return stop


@pytest.mark.parametrize("stopped_after", [3, 5, 8])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_training_that_was_stopped_and_resumed_gives_bit_for_bit_the_weights_of_one_that_was_not(
    *,
    run: Run,
    knobs: Trainer,
    samples: Any,
    toy_target: Any,
    toy_algorithm: Callable[[], Any],
    stopped_after: int,
    accumulation: int,
) -> None:
    for number in range(3):
        samples.put(f"train-{number:06d}")
    run.seal({})
    whole, parted = (
        knobs.model_copy(update={"drafter": name, "accumulation": accumulation}) for name in ("whole", "parted")
    )

    uninterrupted = toy_algorithm()
    assert fit(run, whole, toy_target, uninterrupted, Team.alone(), stop=threading.Event())
    stop = stop_at(toy_target, batch=stopped_after * accumulation)
    assert not fit(run, parted, toy_target, toy_algorithm(), Team.alone(), stop=stop)
    held = checkpoint.latest(run.drafter_dir("parted"))
    assert held is not None
    assert checkpoint.step_of(held) == stopped_after
    torch.manual_seed(1234)
    resumed = toy_algorithm()
    assert fit(run, parted, toy_target, resumed, Team.alone(), stop=threading.Event())

    for name, tensor in uninterrupted.drafter.state_dict().items():
        assert torch.equal(tensor, resumed.drafter.state_dict()[name])


@pytest.mark.parametrize("order", [None, "another", ORDER])
def test_a_training_that_is_resumed_in_mid_epoch_says_where_batches_come_in_another_order(
    *,
    run: Run,
    knobs: Trainer,
    samples: Any,
    toy_target: Any,
    toy_algorithm: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
    order: str | None,
) -> None:
    samples.put("train-000000")
    run.seal({})
    fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=stop_at(toy_target, batch=3))
    held = checkpoint.latest(run.drafter_dir("d"))
    assert held is not None
    stored = torch.load(held / "state.pt", weights_only=True)
    del stored["order"]
    torch.save(stored | ({} if order is None else {"order": order}), held / "state.pt")

    assert fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=threading.Event())

    assert ("batches are ordered otherwise" in caplog.text) == (order != ORDER)
    assert ("what is left of epoch 0 has some rows again" in caplog.text) == (order != ORDER)


def test_a_checkpoint_of_another_shape_is_refused(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[[], Any]
) -> None:
    samples.put("train-000000")
    run.seal({})
    fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=stop_at(toy_target, batch=3))
    other = toy_algorithm()
    other.config = replace(other.config, hidden_size=9)

    with pytest.raises(DrafterError, match="hidden_size 8, now 9"):
        fit(run, knobs, toy_target, other, Team.alone(), stop=threading.Event())
