"""Where the figures of a training go."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftfleet.errors import SettingsError
from draftfleet.runs import Run
from draftfleet.settings import Settings, Trainer
from trainer.pinned import pin
from trainer.team import Team
from trainer.trackers import begin
from trainer.train import fit

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-home"))


def records(folder: Path) -> list[Any]:
    """What an offline run will send: a log as LevelDB writes it, after a header of 7 bytes, in blocks of 32 KB."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("run-*.wandb")
    data, at, found, parts = path.read_bytes(), 7, list[Any](), b""
    while at + 7 < len(data):
        if 32768 - at % 32768 < 7:  # too short for a header: the rest of a block is empty
            at += 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def logged(folder: Path, name: str) -> dict[int, float]:
    """By step."""
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.HasField("history")
    ]
    return {int(row["step"]): row[name] for row in rows}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of its thread
def test_a_folder_that_takes_no_more_curves_ends_them_and_not_the_training(
    run: Run, knobs: Trainer, caplog: pytest.LogCaptureFixture, until: Callable[..., Any]
) -> None:
    [_, board] = begin(run, knobs.model_copy(update={"trackers": ["tensorboard"]}), step=0)
    shutil.rmtree(run.drafter_dir("d"))

    def log() -> bool:
        board.log(1, {"loss": 1.0})
        return "tensorboard ended" in caplog.text

    until(log, what="the end of its thread")
    board.log(2, {"loss": 1.0})
    board.close()
    assert caplog.text.count("tensorboard ended") == 1


def test_wandb_keeps_one_run_over_all_starts_under_the_drafters_folder_with_its_settings(
    *, run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any], until: Any
) -> None:
    samples.put("train-000000")
    run.seal({})
    knobs = knobs.model_copy(update={"trackers": ["tensorboard", "wandb"], "max_steps": 6, "checkpoint_steps": 3})
    pin(run, Settings.model_validate({"run": run.name, "trainer": knobs.model_dump()}))
    folder = run.drafter_dir("d")
    stop = threading.Event()
    toy_target.on_batch = lambda count: stop.set() if count == 4 else None

    assert not fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=stop)
    [first] = (folder / "wandb").glob("offline-run-*")
    assert fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=threading.Event())
    [second] = set((folder / "wandb").glob("offline-run-*")) - {first}

    held = json.loads((folder / "wandb.json").read_text())["id"]
    assert first.name.endswith(held)
    assert second.name.endswith(held)
    until(lambda: list(logged(first, "loss")) == [2, 4], what="the first run's figures on disk")
    until(lambda: list(logged(second, "loss")) == [6], what="the second run's figures on disk")
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert logged(second, "loss")[6] == pytest.approx(board.Scalars("loss")[-1].value)
    assert {"lr", "grad_norm", "tokens_per_s", "real_tokens", "waited_for_states"} <= set(board.Tags()["scalars"])
    [begun] = [record.run for record in records(first) if record.HasField("run")][:1]
    assert begun.display_name == "toy/d"
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["trainer"]["lr"] == knobs.lr


def test_a_server_that_cannot_be_reached_costs_no_training(run: Run) -> None:
    code = (
        "import sys; from draftfleet.runs import Run; from draftfleet.settings import Trainer;"
        "from draftfleet.storage import open_storage; from trainer import trackers; trackers.ANSWER_S = 1.0;"
        "run = Run.open(open_storage(sys.argv[1]), 'toy');"
        "[_, tracker] = trackers.begin(run, Trainer(drafter='d', trackers=['wandb']), step=0);"
        "tracker.log(3, {'loss': 1.5}); tracker.close()"
    )
    unreachable = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}

    said = subprocess.run(
        [sys.executable, "-c", code, run.storage.url],
        env=os.environ | unreachable, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip

    [folder] = (run.drafter_dir("d") / "wandb").glob("offline-run-*")
    assert logged(folder, "loss") == {3: 1.5}
    assert "wandb keeps the run on disk" in said.stderr
    assert f"wandb sync {folder}" in said.stderr


def test_wandb_where_it_is_not_installed_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(SettingsError, match="pip install wandb"):
        begin(run, Trainer(drafter="d", trackers=["wandb"]), step=0)


def test_a_training_without_a_tracker_has_its_log_and_its_progress(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    samples.put("train-000000")
    run.seal({})

    assert fit(
        run, knobs.model_copy(update={"trackers": []}), toy_target, toy_algorithm(), Team.alone(),
        stop=threading.Event(),
    )  # fmt: skip

    assert {path.name for path in run.drafter_dir("d").iterdir()} == {"progress.json", "curve.json", "checkpoints"}
