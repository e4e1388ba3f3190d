"""The loop: what it learns, counts, says, and refuses."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftfleet.errors import RunConflict, SettingsError, StorageUnreadable, TrainingError
from draftfleet.runs import Run
from draftfleet.settings import Settings, Trainer
from trainer import checkpoint
from trainer.devices import choose_device, choose_dtype
from trainer.pinned import pin, with_pinned
from trainer.progress import Progress
from trainer.schedule import learning_rate
from trainer.team import Team
from trainer.train import fit, train

NEVER = threading.Event()


def weights(algorithm: Any) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in algorithm.drafter.state_dict().values()])


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    rates = [learning_rate(step, peak=1.0, max_steps=10, warmup=0.2) for step in range(11)]

    assert rates[:3] == [0.5, 1.0, 1.0]
    assert [round(rate, 2) for rate in rates[3:]] == [0.96, 0.85, 0.69, 0.5, 0.31, 0.15, 0.04, 0.0]
    assert learning_rate(0, peak=1.0, max_steps=10, warmup=0) == 1.0
    assert [learning_rate(step, peak=1.0, max_steps=10, warmup=0.2, shape="linear") for step in (1, 2, 3, 6, 10)] == [
        1.0,
        1.0,
        0.875,
        0.5,
        0.0,
    ]


def test_training_makes_the_loss_fall_and_says_how_it_got_on(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    samples.prompts("train-000000", 8)
    run.commit("train-000000", [samples.make("train-000000", f"r{n}", token_ids=list(range(4, 24))) for n in range(8)])
    samples.put("heldout-000000", 3)
    run.seal({})
    knobs = knobs.model_copy(update={"max_steps": 60, "checkpoint_steps": 25})

    assert fit(run, knobs, toy_target, toy_algorithm(dropout=0.0), Team.alone(), stop=NEVER)

    folder = run.drafter_dir("d")
    progress = json.loads((folder / "progress.json").read_text())
    assert (progress["step"], progress["max_steps"], progress["finished"]) == (60, 60, True)
    assert (progress["rows_admitted"], progress["rows_not_trained"]) == (8, {"heldout": 3})
    assert progress["tokens"] > progress["trained_tokens"] > 0
    assert progress["accuracy"][0] > 0.9
    losses = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("loss")
    assert losses[-1].value < losses[0].value / 4
    assert losses[-1].value == pytest.approx(progress["loss"])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000050", "step-000060"]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_no_hidden_states_are_asked_for_that_no_step_takes(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any], prefetch: int
) -> None:
    samples.put("train-000000")
    run.seal({})
    knobs = knobs.model_copy(update={"max_steps": 3, "accumulation": 2, "prefetch": prefetch})

    assert fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=NEVER)
    assert len(toy_target.seen) == 6
    assert fit(run, knobs.model_copy(update={"max_steps": 4}), toy_target, toy_algorithm(), Team.alone(), stop=NEVER)
    assert len(toy_target.seen) == 8


def test_accumulated_batches_weigh_by_their_tokens_and_not_by_their_number(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    samples.prompts("train-000000", 2)
    long, short = (samples.make("train-000000", str(n), token_ids=[n] * n) for n in (29, 4))
    run.commit("train-000000", [long, short])
    run.seal({})
    one_step = knobs.model_copy(update={"max_steps": 1, "warmup": 0.0, "clip": 1e9, "lr": 1.0})

    results = []
    for name, batch_tokens, accumulation in (("together", 96, 1), ("apart", 32, 2)):
        changed = {"drafter": name, "batch_tokens": batch_tokens, "accumulation": accumulation}
        algorithm = toy_algorithm(dropout=0.0)
        fit(run, one_step.model_copy(update=changed), toy_target, algorithm, Team.alone(), stop=NEVER)
        held = checkpoint.latest(run.drafter_dir(name))
        assert held is not None
        # AdamW's first step is the sign of the gradient; its first moment is the gradient itself, times 0.1.
        moments = checkpoint.read(held).optimizer["state"].values()
        results.append(torch.cat([moment["exp_avg"].flatten() for moment in moments]))

    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_weights_stay_float32_under_bfloat16(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    samples.put("train-000000")
    run.seal({})
    results = []
    for dtype in ("float32", "bfloat16"):
        algorithm = toy_algorithm(dropout=0.0)
        changed = {"drafter": dtype, "dtype": dtype}
        fit(run, knobs.model_copy(update=changed), toy_target, algorithm, Team.alone(), stop=NEVER)
        results.append(weights(algorithm))

    assert results[1].dtype == torch.float32
    assert not torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[1], rtol=0.2, atol=0.1)


def test_a_loss_that_is_not_finite_stops_the_training_and_names_the_rows(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    samples.prompts("train-000000", 2)
    ids = {"a-good-row": [8] * 20, "the-bad-row": [9] * 20}
    run.commit("train-000000", [samples.make("train-000000", key, token_ids=ids[key]) for key in ids])
    run.seal({})
    toy_target.embedding[9] = float("inf")

    with pytest.raises(TrainingError, match="the-bad-row") as stopped:
        fit(run, knobs.model_copy(update={"batch_tokens": 32}), toy_target, toy_algorithm(), Team.alone(), stop=NEVER)

    assert "a-good-row" not in str(stopped.value)


def test_a_gradient_that_is_not_finite_stops_the_training_before_the_update_and_names_the_rows(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    keys = samples.put("train-000000", 3)
    run.seal({})
    algorithm = toy_algorithm()
    before = weights(algorithm)
    algorithm.drafter[0].weight.register_hook(lambda gradient: gradient * float("nan"))

    with pytest.raises(TrainingError, match="the gradient of step 1 is nan") as stopped:
        fit(run, knobs.model_copy(update={"batch_tokens": 200}), toy_target, algorithm, Team.alone(), stop=NEVER)

    assert all(key in str(stopped.value) for key in keys)
    assert torch.equal(weights(algorithm), before)


def test_a_corrupt_shard_does_not_stop_the_training_and_is_counted(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    samples.put("train-000000")
    samples.prompts("train-000001", 4)
    samples.corrupt("train-000001")
    run.seal({})

    assert fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=NEVER)

    progress = Progress.read(run, "d")
    assert progress is not None
    assert (progress.corrupt_shards, progress.rows_admitted) == (1, 12)
    longer = knobs.model_copy(update={"max_steps": knobs.max_steps + 1})
    assert fit(run, longer, toy_target, toy_algorithm(), Team.alone(), stop=NEVER)  # resumed with a whole journal
    progress = Progress.read(run, "d")
    assert progress is not None
    assert (progress.step, progress.corrupt_shards) == (longer.max_steps, 1)


def test_a_storage_that_is_gone_gets_no_checkpoint_in_its_place(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any], tmp_path: Path
) -> None:
    samples.put("train-000000")
    run.seal({})
    knobs = knobs.model_copy(update={"trackers": []})
    mounted, aside = tmp_path / "storage", tmp_path / "unmounted"
    toy_target.on_batch = lambda count: mounted.rename(aside) if count == 7 else None

    with pytest.raises(
        StorageUnreadable, match=r"has no run toy any more, so the checkpoint of step 10 is not written"
    ):
        fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=NEVER)

    assert not list(mounted.glob("toy/drafters/d/checkpoints/*"))
    shutil.rmtree(mounted, ignore_errors=True)
    aside.rename(mounted)
    assert fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=NEVER)


def test_a_training_that_waits_says_so_and_stops_without_a_checkpoint(
    run: Run, knobs: Trainer, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    stop = threading.Event()
    results: list[bool] = []
    training = threading.Thread(
        target=lambda: results.append(fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=stop))
    )

    training.start()
    for _ in range(2000):
        progress = Progress.read(run, "d")
        if progress is not None and progress.waiting:
            break
        training.join(0.01)
    stop.set()
    training.join(10)

    assert progress is not None
    assert progress.waiting
    assert "waiting for samples" in str(progress)
    assert results == [False]
    assert checkpoint.latest(run.drafter_dir("d")) is None


def settings(**trainer: Any) -> Settings:
    return Settings.model_validate({"run": "toy", "trainer": {"drafter": "d", **trainer}})


def test_knobs_that_are_not_given_are_those_of_the_begun_drafter(run: Run) -> None:
    pin(run, settings(max_steps=60, lr=2e-3))

    pin(run, settings(log_steps=3))

    held = with_pinned(run, "d", settings()).trainer
    assert (held.max_steps, held.lr, held.log_steps) == (60, 2e-3, 3)


def test_settings_of_a_drafter_are_pinned_and_each_difference_is_named(run: Run) -> None:
    pin(run, settings(lr=1e-4))
    pin(run, settings(lr=1e-4))

    with pytest.raises(RunConflict) as refused:
        pin(run, settings(lr=2e-4, ttt_steps=5))

    assert "trainer.lr: it has 0.0001, now 0.0002" in str(refused.value)
    assert "trainer.ttt_steps: it has 3, now 5" in str(refused.value)
    assert with_pinned(run, "d", settings()).trainer.lr == 1e-4


def test_a_drafter_that_failed_before_its_first_checkpoint_takes_other_settings(run: Run) -> None:
    pin(run, settings(layers=[7, 99], lr=2e-3))
    with pytest.raises(RunConflict):
        pin(run, settings(layers=[1, 3]))  # it may be at work
    Progress.fail(run, "d", 12, "trainer.layers = [7, 99]: the target has layers 0 to 7")

    pin(run, settings(layers=[1, 3]))
    held = with_pinned(run, "d", settings()).trainer
    assert (held.layers, held.lr) == ([1, 3], 2e-3)
    pin(run, Settings.model_validate({"run": "toy", "trainer": {"drafter": "d", "algorithm": "dflash"},
                                      "dflash": {"block_size": 4}}))  # fmt: skip
    assert with_pinned(run, "d", settings()).dflash.block_size == 4

    (run.drafter_dir("d") / "checkpoints/step-000005").mkdir(parents=True)
    with pytest.raises(RunConflict, match=r"trainer\.layers"):
        pin(run, settings(layers=[1, 4]))


def test_knobs_that_do_not_change_the_drafter_may_change(run: Run) -> None:
    pin(run, settings(log_steps=10, processes=1))

    pin(run, settings(log_steps=3, processes=2, device="cpu"))

    pinned = with_pinned(run, "d", settings()).trainer
    assert (pinned.log_steps, pinned.processes) == (3, 2)


def test_a_node_may_have_the_target_in_another_folder(run: Run) -> None:
    pin(run, Settings.model_validate({"run": "toy", "trainer": {"drafter": "d"}, "target": {"path": "/models/a"}}))

    elsewhere = Settings.model_validate({"run": "toy", "target": {"path": "/mnt/a"}})

    assert with_pinned(run, "d", elsewhere).target.path == "/mnt/a"
    assert with_pinned(run, "d", Settings.model_validate({})).target.path == "/models/a"


def test_the_device_is_that_of_the_node_and_not_of_who_asked(run: Run) -> None:
    pin(run, settings(device="cuda:7"))

    assert with_pinned(run, "d", settings(device="cpu")).trainer.device == "cpu"
    assert with_pinned(run, "d", settings()).trainer.device == "auto"


def test_a_training_that_was_killed_after_its_last_checkpoint_is_said_to_be_finished(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    samples.put("train-000000")
    run.seal({})
    fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=NEVER)
    progress = Progress.read(run, "d")
    assert progress is not None
    replace(progress, step=10, finished=False, waiting=True).write(run, "d")

    again = Settings.model_validate({"run": "toy", "storage": {"url": run.storage.url}, "trainer": knobs.model_dump()})
    assert train(again, NEVER)

    progress = Progress.read(run, "d")
    assert progress is not None
    assert (progress.step, progress.checkpoint_step, progress.finished, progress.waiting) == (12, 12, True, False)


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda"])
def test_a_device_that_is_not_there_is_refused_with_those_that_may_be(name: str) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")

    with pytest.raises(SettingsError, match=rf"trainer\.device = {name}.*use auto"):
        choose_device(name)


def test_the_precision_is_that_of_the_device_unless_named() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)

    assert [choose_dtype("auto", device) for device in (cpu, gpu)] == [torch.float32, torch.bfloat16]
    assert [choose_dtype("float32", gpu), choose_dtype("bfloat16", cpu)] == [torch.float32, torch.bfloat16]
