"""A second run that goes on from the first one's drafter: what it begins with, and what is refused with which words."""

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
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftfleet import drafters
from draftfleet.errors import DrafterError, DraftfleetError, RunMissing, SettingsError, TargetError
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.settings import Storage as Where
from draftfleet.storage import FileStorage, open_storage
from trainer import algorithms, checkpoint, drafter, targets
from trainer.algorithms import starting
from trainer.algorithms.dflash.algorithm import DFlash
from trainer.algorithms.starting import Source
from trainer.checkpoint import State
from trainer.data import Journal
from trainer.export import export
from trainer.targets.hf import HfTarget
from trainer.team import Team
from trainer.train import train

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
NEVER = threading.Event()
LAYERS = [1, 2, 3, 4, 5]
SMALL = {"dflash.num_layers": 1, "dflash.block_size": 4, "dflash.anchors": 8}


def settings_for(folder: Path | str, **flags: Any) -> Settings:
    base = {
        "storage.url": str(folder),
        "run": "second",
        "target.path": TINY,
        "trainer.drafter": "d",
        "trainer.algorithm": "dflash",
        "trainer.device": "cpu",
        "trainer.batch_tokens": 192,
        "trainer.lr": 3e-3,
        "trainer.log_steps": 1,
        "trainer.poll_s": 0.01,
    }
    return load(flags=base | SMALL | flags)


@pytest.fixture(scope="module")
def target() -> HfTarget:
    found = targets.load(load(flags={"target.path": TINY}), LAYERS, torch.device("cpu"))
    assert isinstance(found, HfTarget)
    return found


@pytest.fixture
def second(tmp_path: Path) -> Run:
    return Run.create(FileStorage(tmp_path), "second", {}, {})


def made(target: HfTarget, **flags: Any) -> DFlash:
    torch.manual_seed(5)
    algorithm = algorithms.build(algorithms.configure(settings_for("unused", **flags), target), target)
    assert isinstance(algorithm, DFlash)
    return algorithm


def stored(folder: Path, algorithm: DFlash, /, **changes: Any) -> Path:
    drafter.save(folder, replace(algorithm.config, **changes), algorithm.drafter.state_dict())
    return folder


def begun(run: Run, target: HfTarget, source: Path | str, **flags: Any) -> DFlash:
    torch.manual_seed(6)
    knobs = settings_for(run.storage.url, **{"dflash.start_from": str(source)}, **flags)
    algorithm = algorithms.begin(run, knobs, target, Team.alone(), NEVER)
    assert isinstance(algorithm, DFlash)
    return algorithm


def assert_same(algorithm: DFlash, other: DFlash) -> None:
    ours, theirs = algorithm.drafter.state_dict(), other.drafter.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def losses(run: Run, name: str = "d") -> list[float]:
    board = EventAccumulator(str(run.drafter_dir(name) / "tensorboard")).Reload()
    return [scalar.value for scalar in board.Scalars("loss")]


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_second_run_goes_on_where_the_drafter_of_the_first_ended_and_resumes_without_it(
    second: Run, put_sums: Callable[..., None], tmp_path: Path, algorithm: str
) -> None:
    first = Run.create(second.storage, "first", {}, {})
    for run, part in ((first, slice(0, 8)), (second, slice(4, 12))):
        put_sums(run, "train-000000", part)
        run.seal({})
    kind = {"trainer.algorithm": algorithm}
    assert train(settings_for(tmp_path, **kind, **{"run": "first", "trainer.max_steps": 30}), NEVER)
    onwards = {**kind, f"{algorithm}.start_from": "run:first/d", "trainer.max_steps": 2, "trainer.seed": 1}
    assert train(settings_for(tmp_path, **onwards), NEVER)

    fresh, last, begins = losses(first)[0], losses(first)[-1], losses(second)[0]
    assert last < 0.7 * fresh
    assert begins < last + 0.25 * (fresh - last)

    shutil.rmtree(first.drafter_dir("d"))
    (second.drafter_dir("d") / "drafter-settings.json").unlink()  # it pins the number of steps
    assert train(settings_for(tmp_path, **onwards | {"trainer.max_steps": 3}), NEVER)
    assert len(losses(second)) == 3


def test_a_drafter_of_a_run_on_an_object_store_is_brought_to_this_node(
    s3_url: str, target: HfTarget, tmp_path: Path
) -> None:
    there, here = (
        Run.create(open_storage(Where(url=s3_url, local_dir=str(tmp_path / node))), "first", {}, {})
        for node in ("there", "here")
    )
    other = made(target)
    checkpoint.write(
        there.drafter_dir("d"), config=other.config, tensors=other.drafter.state_dict(), state=State(step=7),
        optimizer={}, journal=Journal(), keep=1,
    )  # fmt: skip
    drafters.share(there, "d", "checkpoints")

    found = starting.load(Source("dflash.start_from", "run:first/d"), here, Team.alone())

    assert found.config == other.config
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in other.drafter.state_dict().items())


@pytest.mark.parametrize("format_name", ["vllm", "sglang", "speculators"])
def test_a_dflash_drafter_begins_with_the_weights_of_an_engines_folder(
    second: Run, target: HfTarget, tmp_path: Path, format_name: str
) -> None:
    other = made(target)
    folder = second.drafter_dir("e")
    checkpoint.write(
        folder, config=other.config, tensors=other.drafter.state_dict(), state=State(step=7), optimizer={},
        journal=Journal(), keep=1,
    )  # fmt: skip
    knobs = {"trainer.drafter": "e", "export.dtype": "float32"}
    exported = export(settings_for(tmp_path, **knobs), [format_name])[format_name]

    algorithm = begun(second, target, exported)

    assert_same(algorithm, other)
    assert algorithm.config.mask_token_id == other.config.mask_token_id


def test_a_block_may_be_longer_than_it_was_and_what_no_knob_says_is_the_drafters(
    second: Run, target: HfTarget, tmp_path: Path
) -> None:
    other = made(target)
    narrow = DFlash(replace(other.config, intermediate_size=64, mask_token_id=9), target)

    algorithm = begun(second, target, stored(tmp_path / "narrow", narrow), **{"dflash.block_size": 8})

    assert (algorithm.config.intermediate_size, algorithm.config.mask_token_id) == (64, 9)
    assert algorithm.config.block_size == 8
    assert_same(algorithm, narrow)


def test_every_difference_in_shape_is_named_with_what_it_must_be(second: Run, target: HfTarget, tmp_path: Path) -> None:
    sliding = {"dflash.layer_types": ["sliding_attention"], "dflash.sliding_window": 32}
    folder = stored(tmp_path / "other", made(target, **sliding), layers=[0, 2, 3, 4, 5])

    with pytest.raises(SettingsError) as refused:
        begun(second, target, folder, **{"dflash.num_layers": 2, "dflash.mask_token_id": 5})

    assert str(refused.value).splitlines()[1:-1] == [
        "  trainer.layers = [1, 2, 3, 4, 5]: the drafter has [0, 2, 3, 4, 5]",
        "  dflash.num_layers = 2: the drafter has 1",
        "  dflash.layer_types = ['full_attention', 'full_attention']: the drafter has ['sliding_attention']",
        "  dflash.sliding_window = (unset): the drafter has 32",
        "  dflash.mask_token_id = 5: the drafter has 0",
    ]


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        (
            {"vocab_size": 99, "num_target_layers": 4},
            TargetError,
            "vocab_size 99, not 2048; num_target_layers 4, not 8",
        ),
        ({"hidden_size": 64, "target_hidden_size": 64}, TargetError, "hidden_size 64, not 192; target_hidden_size 64"),
        ({"draft_vocab_size": 40}, TargetError, "a drafter of 40 tokens, with a head of its own"),
        ({"algorithm": "eagle3"}, SettingsError, "holds a drafter of eagle3, and trainer.algorithm = dflash"),
        ({"intermediate_size": 64}, DrafterError, r"layers\.0\.mlp\.up_proj\.weight has shape"),
    ],
)
def test_a_drafter_of_another_target_vocabulary_or_kind_is_refused(
    *,
    second: Run,
    target: HfTarget,
    tmp_path: Path,
    changes: dict[str, Any],
    kind: type[DraftfleetError],
    said: str,
) -> None:
    folder = stored(tmp_path / "other", made(target), **changes)

    with pytest.raises(kind, match=said):
        begun(second, target, folder)


def test_an_embedding_that_is_not_the_targets_is_refused(second: Run, target: HfTarget, tmp_path: Path) -> None:
    other = made(target)
    checkpoint.write(
        second.drafter_dir("e"), config=other.config, tensors=other.drafter.state_dict(), state=State(step=7),
        optimizer={}, journal=Journal(), keep=1,
    )  # fmt: skip
    folder = export(settings_for(tmp_path, **{"trainer.drafter": "e", "export.dtype": "float32"}), ["vllm"])["vllm"]
    tensors = {name: tensor.clone() for name, tensor in other.drafter.state_dict().items()}
    save_file(tensors | {"embed_tokens.weight": target.embedding.roll(1, 0)}, folder / "model.safetensors")

    with pytest.raises(TargetError, match="an embedding of its own"):
        begun(second, target, folder)


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("run:first", DrafterError, "name a run and its drafter, as in run:first/eagle3"),
        ("run:../x/d", DrafterError, "name a run and its drafter"),
        ("run:nowhere/d", RunMissing, "run nowhere is not in"),
        (
            "run:second/none",
            DrafterError,
            r"dflash\.start_from = run:second/none: run second has no checkpoint of a drafter none",
        ),
        ("first/d", DrafterError, "there is no such folder on this machine.* run:first/eagle3"),
    ],
)
def test_a_drafter_that_is_not_there_is_refused_by_name(
    *, second: Run, target: HfTarget, source: str, kind: type[DraftfleetError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        begun(second, target, source)


def test_a_torn_description_is_refused(second: Run, target: HfTarget, tmp_path: Path) -> None:
    (stored(tmp_path / "torn", made(target)) / "drafter.json").write_text(json.dumps({"algorithm": "dflash"}))

    with pytest.raises(DrafterError, match="torn is not a drafter of draftfleet"):
        begun(second, target, tmp_path / "torn")
