"""curve.json: bounded, goes on after a checkpoint, and needs no torch to be read."""

from __future__ import annotations

from pathlib import Path

from draftfleet import drafters
from draftfleet.runs import Run
from trainer.curve import MOST_POINTS, Curve, of_tensorboard


def test_a_curve_is_thinned_but_for_what_was_measured(run: Run) -> None:
    curve = Curve(run, "d", 0)
    for step in range(1, 3 * MOST_POINTS):
        curve.log(step, {"loss": 1 / step})
        if step % 500 == 0:
            curve.log(step, {"acceptance_length": 2.0})
    curve.log(3 * MOST_POINTS, {"loss": float("nan")})
    curve.close()

    said = drafters.read(run, "d", "curve.json") or {}
    assert len(said["steps"]) <= MOST_POINTS
    assert said["steps"] == sorted(said["steps"])
    assert {500, 1000, 1500, 2000, 2500, 3 * MOST_POINTS} <= set(said["steps"])
    assert said["values"]["loss"][-1] is None
    assert sum(value is not None for value in said["values"]["acceptance_length"]) == 5


def test_a_training_that_goes_on_replaces_what_came_after_its_checkpoint(run: Run) -> None:
    first = Curve(run, "d", 0)
    for step in (10, 20, 30):
        first.log(step, {"loss": float(step)})
    first.close()

    second = Curve(run, "d", 20)
    second.log(30, {"loss": 3.0})
    second.close()

    said = drafters.read(run, "d", "curve.json") or {}
    assert said == {"steps": [10, 20, 30], "values": {"loss": [10.0, 20.0, 3.0]}}


def test_tensorboards_files_tell_the_same(tmp_path: Path) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in (10, 20):
            writer.add_scalar("loss", step / 2, step)

    assert of_tensorboard(tmp_path) == {"steps": [10, 20], "values": {"loss": [5.0, 10.0]}}
    assert of_tensorboard(tmp_path / "none") is None
