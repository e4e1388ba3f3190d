"""The best checkpoint: measured while training without changing it, kept, named, and taken by those who ask for it."""

from __future__ import annotations

import json
import random
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftfleet import drafters
from draftfleet.errors import DrafterError, SettingsError
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment, load
from draftfleet.storage import FileStorage, open_storage
from trainer import acceptance, best, checkpoint
from trainer.acceptance import measure_all
from trainer.best import Acceptance, choose
from trainer.checkpoint import State
from trainer.child import command
from trainer.data import Journal
from trainer.evaluate import evaluate
from trainer.export import export
from trainer.progress import Progress
from trainer.speculate import decode_with_drafter
from trainer.tasks import enqueue
from trainer.train import train

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
NEVER = threading.Event()


def settings_for(folder: Path, **flags: Any) -> Settings:
    base = {
        "storage.url": str(folder),
        "run": "sums",
        "target.path": TINY,
        "trainer.drafter": "d",
        "trainer.device": "cpu",
        "trainer.batch_tokens": 192,
        "trainer.lr": 3e-3,
        "trainer.max_steps": 9,
        "trainer.checkpoint_steps": 100,
        "trainer.keep_checkpoints": 1,
        "trainer.evaluate_prompts": 2,
        "trainer.poll_s": 0.01,
        "evaluation.max_tokens": 16,
        "evaluation.prompts": 3,
    }
    return load(flags=base | flags)


Put = Callable[..., None]


@pytest.fixture
def home(tmp_path: Path) -> Run:
    return Run.create(FileStorage(tmp_path), "sums", {"sampling.thinking": True, "sampling.extra_body": {}}, {})


@pytest.fixture
def put(home: Run, put_sums: Callable[..., None]) -> Put:
    return partial(put_sums, home)


@pytest.fixture
def made(home: Run, put: Put) -> Run:
    put("train-000000", slice(0, 8))
    put("heldout-000000", slice(8, 12))
    home.seal({})
    return home


def measured(step: int, length: float, asked: str = "these") -> Acceptance:
    return Acceptance(
        step=step, acceptance_length=length, acceptance_per_position=[length - 1], k=1, prompts=2, max_tokens=16,
        drafts=5, seconds=1.0, asked=asked,
    )  # fmt: skip


@pytest.fixture
def stored(home: Run, toy_algorithm: Callable[..., Any]) -> Callable[..., Path]:
    """A checkpoint of a toy, measured or not."""

    def write(step: int, length: float | None = None, *, keep: int = 9, asked: str = "these") -> Path:
        folder = home.drafter_dir("d")
        path = checkpoint.write(
            folder, config=toy_algorithm().config, tensors={"weight": torch.ones(2)}, state=State(step=step),
            optimizer={}, journal=Journal(), keep=keep, spare=best.spared(folder),
        )  # fmt: skip
        if length is not None:
            measured(step, length, asked).record(path)
        return path

    return write


def test_the_best_checkpoint_stays_however_old_it_gets(home: Run, stored: Callable[..., Path]) -> None:
    for step, length in ((5, 1.5), (10, 3.0), (15, 2.0), (20, 2.5), (25, None)):
        stored(step, length, keep=2)

    assert [path.name for path in checkpoint.whole(home.drafter_dir("d"))] == [
        "step-000025", "step-000020", "step-000010",
    ]  # fmt: skip
    assert best.announce(home, "d") == measured(10, 3.0)
    assert (drafters.read(home, "d", "best.json") or {})["checkpoint"] == "step-000010"


def test_of_two_that_are_as_good_the_newer_is_the_best_and_other_prompts_do_not_compare(
    home: Run, stored: Callable[..., Path]
) -> None:
    stored(5, 9.0, asked="others")
    first, second = stored(10, 2.0), stored(15, 2.0)

    assert best.spared(home.drafter_dir("d")) == second
    (second / "drafter.json").unlink()
    assert best.spared(home.drafter_dir("d")) == first


def test_the_checkpoint_that_is_meant_is_taken_and_said(
    home: Run, stored: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="trainer")
    with pytest.raises(DrafterError, match=r"no checkpoint of drafter d .*draftfleet train --run sums"):
        choose(home, "d")
    stored(5)
    unmeasured = stored(10)
    assert choose(home, "d") == unmeasured
    assert "none was measured" in caplog.text
    with pytest.raises(DrafterError, match="evaluate --checkpoint all"):
        choose(home, "d", "best")

    older, newer = stored(15, 3.0), stored(20, 2.0)

    assert choose(home, "d") == choose(home, "d", "best") == choose(home, "d", "15") == older
    assert "checkpoint chosen run=sums drafter=d checkpoint=step-000015" in caplog.text
    assert "an acceptance length of 3.00" in caplog.text
    assert choose(home, "d", "latest") == choose(home, "d", "step-000020") == newer
    with pytest.raises(DrafterError, match=r"no checkpoint 7: use best, latest, or a step .*: 5, 10, 15, 20\."):
        choose(home, "d", "7")


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_measuring_changes_no_bit_of_what_is_trained(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    def drawing(*args: Any, **more: Any) -> Any:
        torch.rand(3)
        random.random()
        return decode_with_drafter(*args, **more)

    monkeypatch.setattr(acceptance, "decode_with_drafter", drawing)
    small = {"trainer.algorithm": algorithm, "dflash.num_layers": 1, "dflash.block_size": 4, "dflash.anchors": 6}
    plain = settings_for(tmp_path, **small, **{"trainer.drafter": "plain"})
    judged = settings_for(tmp_path, **small, **{"trainer.drafter": "judged", "trainer.evaluate_steps": 3})

    assert train(plain, NEVER)
    assert train(judged, NEVER)

    one, other = (checkpoint.read(made.drafter_dir(name) / "checkpoints/step-000009") for name in ("plain", "judged"))
    assert all(torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items())
    assert torch.equal(one.random.torch, other.random.torch)
    assert one.random.python == other.random.python
    assert one.state == other.state
    progress = Progress.read(made, "judged")
    assert progress is not None
    assert progress.acceptance_step == 9
    assert f"acceptance {progress.acceptance_length:.2f} at step 9" in str(progress)
    board = EventAccumulator(str(made.drafter_dir("judged") / "tensorboard")).Reload().Scalars("acceptance_length")
    assert [scalar.step for scalar in board] == [3, 6, 9]
    assert board[-1].value == pytest.approx(progress.acceptance_length)
    last = Acceptance.find(made.drafter_dir("judged") / "checkpoints/step-000009")
    assert last is not None
    assert (last.k, last.prompts, last.acceptance_length) == (3, 2, progress.acceptance_length)
    named = drafters.read(made, "judged", "best.json") or {}
    assert named["acceptance_length"] == pytest.approx(max(scalar.value for scalar in board))


def test_evaluation_and_export_take_the_best_unless_told_otherwise(made: Run, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, **{"trainer.checkpoint_steps": 3, "trainer.keep_checkpoints": 3})
    assert train(settings, NEVER)
    assert evaluate(settings, progress=False).checkpoint == "step-000009"

    found = measure_all(settings)

    assert list(found["acceptance_length"]) == ["step-000003", "step-000006", "step-000009"]
    assert found["acceptance_length"][f"step-{found['best']:06d}"] == max(found["acceptance_length"].values())
    assert (drafters.read(made, "d", "best.json") or {})["step"] == found["best"]

    folder = made.drafter_dir("d")
    export(settings, ["vllm"], which="latest")
    first = folder / "checkpoints/step-000003"
    said = Acceptance.find(first)
    assert said is not None
    replace(said, acceptance_length=3.9).record(first)

    assert evaluate(settings, progress=False).checkpoint == "step-000003"
    assert evaluate(settings, progress=False, which="6").checkpoint == "step-000006"
    exported = export(settings, ["vllm"])["vllm"]
    assert json.loads((exported / "export.json").read_text())["step"] == 3


def test_a_run_that_still_grows_is_measured_once_its_prompts_are_there_and_then_on_the_same_ones(
    home: Run, put: Put, tmp_path: Path, caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    put("train-000000", slice(0, 4))
    put("heldout-000000", slice(8, 9))
    settings = settings_for(tmp_path, **{"trainer.evaluate_steps": 1, "trainer.keep_checkpoints": 9})
    over = threading.Event()

    def produce() -> None:
        until(lambda: "acceptance not measured" in caplog.text, what="a measurement without prompts")
        put("heldout-000001", slice(9, 12))
        put("train-000001", slice(4, 8))
        home.seal({})
        over.set()

    producing = threading.Thread(target=produce)
    producing.start()
    assert train(settings, NEVER)
    producing.join()

    assert over.is_set()
    assert "acceptance not measured run=sums step=1 held_out_prompts=1 wanted=2" in caplog.text
    found = [Acceptance.find(path) for path in checkpoint.whole(home.drafter_dir("d"))]
    said = [one for one in found if one is not None]
    assert 0 < len(said) < 9
    assert {(one.asked, one.prompts) for one in said} == {(said[0].asked, 2)}


def test_who_is_asked_to_stop_does_not_finish_measuring(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()

    def stopped(*args: Any, **more: Any) -> Any:
        stop.set()
        return decode_with_drafter(*args, **more)

    monkeypatch.setattr(acceptance, "decode_with_drafter", stopped)
    train(settings_for(tmp_path, **{"trainer.evaluate_steps": 4}), stop)

    newest = checkpoint.latest(made.drafter_dir("d"))
    assert newest is not None
    assert Acceptance.find(newest) is None
    assert best.announce(made, "d") is None


def test_a_training_is_finished_once_its_last_checkpoint_was_measured_whoever_ends_before(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, finished = threading.Event(), list[bool]()

    def stopped(*args: Any, **more: Any) -> Any:
        progress = Progress.read(made, "d")
        assert progress is not None
        finished.append(progress.finished)
        stop.set()
        return decode_with_drafter(*args, **more)

    settings = settings_for(tmp_path, **{"trainer.evaluate_steps": 9})
    with monkeypatch.context() as patched:
        patched.setattr(acceptance, "decode_with_drafter", stopped)
        assert not train(settings, stop)
    assert finished == [False]

    assert train(settings, NEVER)

    progress = Progress.read(made, "d")
    assert progress is not None
    assert (progress.finished, progress.step, progress.acceptance_step) == (True, 9, 9)
    assert (drafters.read(made, "d", "best.json") or {})["step"] == 9


def test_what_could_never_be_measured_is_refused_before_the_first_step(made: Run, put: Put, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, **{"trainer.evaluate_steps": 5})
    elsewhere = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"target": "cache"})})

    with pytest.raises(
        SettingsError, match=r"trainer\.evaluate_steps = 5: .* trainer\.target = cache has it elsewhere"
    ):
        enqueue(elsewhere)
    other = Run.create(open_storage(str(tmp_path)), "other", {}, {})
    other.seal({})
    with pytest.raises(SettingsError, match=r"run other has no held-out prompts .*producer\.heldout"):
        train(settings.model_copy(update={"run": "other"}), NEVER)


def test_of_two_processes_the_first_measures_what_one_alone_would(made: Run, tmp_path: Path) -> None:
    knobs = {"trainer.accumulation": 2, "trainer.max_steps": 2, "trainer.evaluate_steps": 1}
    assert train(settings_for(tmp_path, **knobs, **{"trainer.drafter": "one"}), NEVER)
    together = settings_for(tmp_path, **knobs, **{"trainer.drafter": "two", "trainer.processes": 2})

    subprocess.run(command(2), env=environment(together), check=True, timeout=240, stdin=subprocess.DEVNULL)

    one, two = (drafters.read(made, name, "best.json") or {} for name in ("one", "two"))
    assert two["acceptance_length"] == pytest.approx(one["acceptance_length"], abs=0.1)
    assert (two["asked"], two["prompts"]) == (one["asked"], 2)
