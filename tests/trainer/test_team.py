"""Two processes that train one drafter: as one does, again from a checkpoint, and to an end when one of them dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftfleet import children, ports
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import environment, load
from draftfleet.storage import FileStorage
from trainer import checkpoint
from trainer.child import command

pytestmark = pytest.mark.timeout(900)  # nine seconds of computing, in processes that a busy machine is slow to start

TINY = Path(__file__).parents[2] / "examples" / "tiny-target"
STEPS = 6

CASES: dict[str, dict[str, Any]] = {
    "eagle3-adamw": {"algorithm": "eagle3", "optimizer": "adamw"},
    "eagle3-muon-ahead": {"algorithm": "eagle3", "optimizer": "muon", "prefetch": 2},
    "dflash-adamw-ahead": {"algorithm": "dflash", "optimizer": "adamw", "prefetch": 2},
    "dflash-muon": {"algorithm": "dflash", "optimizer": "muon"},
}

MEMBER = """
import json, os, signal, sys, threading
from draftfleet.settings import load
from trainer.targets.hf import HfTarget
from trainer.train import train

die_at = int(os.environ.get("DIE_AT", "0"))  # batch that the second process does not live to train on
for port, flags in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    if die_at and os.environ["RANK"] == "1":
        capture = HfTarget.capture

        def mortal(self, batches):
            for number, captured in enumerate(capture(self, batches), start=1):
                if number == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield captured

        HfTarget.capture = mortal
    assert train(load(flags=flags), threading.Event())
"""
"""Trains each drafter that it is given, one after the other: what takes long is the start of a process."""


def flags(run: Run, drafter: str, **trainer: Any) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "drafter": drafter, "max_steps": STEPS, "batch_tokens": 64, "accumulation": 3, "log_steps": 1, "poll_s": 0.05,
        "checkpoint_steps": 2, "keep_checkpoints": 9, "device": "cpu", "lr": 1e-3,
    }  # fmt: skip
    small = {"dflash.num_layers": 1, "dflash.block_size": 4, "dflash.mask_token_id": 100}
    named = {f"trainer.{name}": value for name, value in (knobs | trainer).items()}
    return {"run": run.name, "storage.url": run.storage.url, "target.path": str(TINY), **small, **named}


def start(folder: Path, size: int, trainings: list[dict[str, Any]], **env: str) -> list[subprocess.Popen[bytes]]:
    asked = json.dumps([(ports.free_port(), training) for training in trainings])
    team = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size)} | env
    return [
        children.spawn(
            [sys.executable, "-c", MEMBER, asked],
            log=folder / f"process-{rank}.log",
            env=os.environ | team | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]


def ended(team: list[subprocess.Popen[bytes]], folder: Path) -> list[int]:
    """Exit codes. A process that hangs fails the test, with what it said."""
    try:
        return [process.wait(400) for process in team]
    finally:
        for rank, process in enumerate(team):
            children.stop(process, grace_s=0)
            print((folder / f"process-{rank}.log").read_text()[-3000:])


def losses(run: Run, drafter: str) -> list[float]:
    board = EventAccumulator(str(run.drafter_dir(drafter) / "tensorboard")).Reload()
    return [scalar.value for scalar in board.Scalars("loss")]


def held(run: Run, drafter: str, step: int = STEPS) -> checkpoint.Checkpoint:
    return checkpoint.read(run.drafter_dir(drafter) / f"checkpoints/step-{step:06d}")


def equal(one: Any, other: Any) -> bool:
    """Tensors within, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return one == other


def fill(run: Run) -> None:
    """Three shards of rows of every length, with ids that mean nothing."""
    dice = random.Random(0)
    for batch in (f"train-{number:06d}" for number in range(3)):
        run.write_prompts(batch, [])
        samples: list[Sample] = []
        for number in range(10):
            key, ids = f"{batch}-{number}", [dice.randrange(32) for _ in range(dice.randrange(6, 40))]
            samples.append(
                Sample(
                    run_id=run.run_id, run=run.name, batch=batch, row_key=key, prompt_id=key, split="train",
                    messages=[{"role": "user", "content": key}], outcome="ok", prompt_token_ids=[1, 2], token_ids=ids,
                    ids_source="engine", completion_tokens=len(ids),
                )
            )  # fmt: skip
        run.commit(batch, samples)
    run.seal({})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a drafter for each case, trained by two processes."""
    run = Run.create(FileStorage(tmp_path_factory.mktemp("storage")), "toy", {"target.model": "toy-target"}, {})
    fill(run)
    folder = tmp_path_factory.mktemp("team")

    team = start(folder, 2, [flags(run, name, **case) for name, case in CASES.items()])

    assert ended(team, folder) == [0, 0]
    return run


def test_two_processes_have_the_losses_of_one(trained: Run, tmp_path: Path) -> None:
    alone = start(tmp_path, 1, [flags(trained, f"{name}-alone", **case) for name, case in CASES.items()])

    assert ended(alone, tmp_path) == [0]

    for name in CASES:
        assert len(losses(trained, name)) == STEPS
        # Sums of processes round differently, and torch's Muon magnifies it, since it works in bfloat16:
        # 1.5e-5 after five steps.
        tolerance = 1e-4 if "muon" in name else 1e-5
        assert losses(trained, name) == pytest.approx(losses(trained, f"{name}-alone"), rel=tolerance), name


@pytest.mark.parametrize("name", ["eagle3-muon-ahead", "dflash-adamw-ahead"])
def test_a_team_that_lost_a_process_ends_and_resumed_it_has_the_bits_of_one_that_did_not(
    trained: Run, tmp_path: Path, name: str
) -> None:
    training = [flags(trained, f"{name}-parted", **CASES[name])]

    codes = ended(start(tmp_path, 2, training, DIE_AT="5"), tmp_path)

    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in {0, -signal.SIGKILL}  # it came to its end by itself
    left = checkpoint.latest(trained.drafter_dir(f"{name}-parted"))
    assert left is not None
    assert 0 < checkpoint.step_of(left) < STEPS
    assert ended(start(tmp_path, 2, training), tmp_path) == [0, 0]
    whole, parted = held(trained, name), held(trained, f"{name}-parted")
    assert equal(whole.tensors, parted.tensors)
    assert equal(whole.optimizer, parted.optimizer)
    assert whole.state == parted.state


def test_torchrun_ends_all_processes_when_one_of_them_is_killed(
    trained: Run, tmp_path: Path, until: Callable[..., Any]
) -> None:
    settings = load(flags=flags(trained, "killed", max_steps=100_000, accumulation=2, prefetch=2))
    launcher = children.spawn(command(2), log=tmp_path / "log", env=environment(settings))
    try:
        folder = trained.drafter_dir("killed")
        until(lambda: checkpoint.latest(folder), what="a checkpoint", deadline_s=200)
        team = psutil.Process(launcher.pid).children(recursive=True)
        victim = next(one for one in team if one.environ().get("RANK") == "1")

        victim.kill()

        assert launcher.wait(200) != 0
        assert not any(one.is_running() and one.status() != "zombie" for one in team)
    finally:
        children.stop(launcher, grace_s=0)
        print((tmp_path / "log").read_text()[-3000:])
