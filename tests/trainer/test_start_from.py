"""A training that starts from another drafter: whose folders are read, and what is refused with which words."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftfleet.errors import DrafterError, SettingsError, TargetError
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from trainer import algorithms, checkpoint, drafter, targets
from trainer.algorithms.eagle3 import Eagle3
from trainer.targets.hf import HfTarget
from trainer.team import Team
from trainer.train import train

NEVER = threading.Event()
TINY = Path(__file__).parents[2] / "examples" / "tiny-target"
LAYERS = [2, 4, 6]
OPTIONS = {
    "eagle3.draft_vocab_size": 40,
    "eagle3.fc_norm": True,
    "eagle3.norm_output": True,
    "eagle3.style": "qwen3",
}


def settings(**flags: Any) -> Settings:
    base = {"run": "toy", "target.path": str(TINY), "trainer.drafter": "d", "trainer.layers": LAYERS}
    return load(flags=base | {"trainer.device": "cpu"} | flags)


@pytest.fixture(scope="module")
def target() -> HfTarget:
    found = targets.load(settings(), LAYERS, torch.device("cpu"))
    assert isinstance(found, HfTarget)
    return found


def made(target: HfTarget, **flags: Any) -> Eagle3:
    torch.manual_seed(5)
    algorithm = algorithms.build(algorithms.configure(settings(**flags), target), target)
    assert isinstance(algorithm, Eagle3)
    if algorithm.config.draft_vocab_size:
        algorithm.drafter.take_vocabulary(torch.arange(100, 100 + 3 * algorithm.config.draft_vocab_size, 3), target)
    return algorithm


def stored(folder: Path, algorithm: Eagle3) -> Path:
    drafter.save(folder, algorithm.config, algorithm.drafter.state_dict())
    return folder


def native(folder: Path, algorithm: Eagle3, **changes: Any) -> Path:
    """As an engine's folder: what vLLM and SGLang need, and not more."""
    config = algorithm.config
    fields = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "max_position_embeddings", "vocab_size", "rope_parameters", "norm_output", "draft_vocab_size",
    )  # fmt: skip
    written = {name: getattr(config, name) for name in fields} | {"architectures": ["LlamaForCausalLMEagle3"]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written | changes))
    save_file(
        {name: tensor.clone() for name, tensor in algorithm.drafter.state_dict().items()}, folder / "model.safetensors"
    )
    return folder


def begun(run: Run, target: HfTarget, folder: Path, **flags: Any) -> Eagle3:
    torch.manual_seed(6)
    knobs = settings(**{"storage.url": run.storage.url, "eagle3.start_from": str(folder)}, **flags)
    algorithm = algorithms.begin(run, knobs, target, Team.alone(), NEVER)
    assert isinstance(algorithm, Eagle3)
    return algorithm


def assert_same(algorithm: Eagle3, tensors: dict[str, Tensor]) -> None:
    ours = algorithm.drafter.state_dict()
    assert ours.keys() == tensors.keys()
    assert all(torch.equal(ours[name], tensors[name]) for name in ours)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("kind", ["ours", "vllm", "sglang"])
def test_a_drafter_begins_with_the_weights_and_vocabulary_of_a_folder_of_each_kind(
    run: Run, target: HfTarget, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    other = made(target, **options)
    with torch.no_grad():
        other.drafter.lm_head.weight.mul_(1.5)
    layers = {
        "vllm": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS]},
        "sglang": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
    }
    folder = tmp_path / "other"
    if kind == "ours":
        stored(folder, other)
    else:
        native(folder, other, **layers[kind])

    algorithm = begun(run, target, folder, **options)

    assert_same(algorithm, other.drafter.state_dict())
    assert algorithm.config == other.config


def test_what_an_engines_folder_may_leave_out_is_the_targets_or_follows_from_the_rest(
    run: Run, target: HfTarget, tmp_path: Path
) -> None:
    whole, reduced = made(target), made(target, **OPTIONS)
    for algorithm, name, left_out in ((whole, "whole", "lm_head.weight"), (reduced, "reduced", "t2d")):
        folder = native(tmp_path / name, algorithm, eagle_aux_hidden_state_layer_ids=[3, 5, 7])
        tensors = load_file(folder / "model.safetensors")
        del tensors[left_out]
        tensors = {
            name.replace("midlayer.", "layers.0."): tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        save_file(tensors | {"embed_tokens.weight": target.embedding.bfloat16()}, folder / "model.safetensors")

        found = begun(run, target, folder, **(OPTIONS if name == "reduced" else {})).drafter.state_dict()

        expected = algorithm.drafter.state_dict()
        assert torch.equal(found[left_out], expected[left_out])
        torch.testing.assert_close(found["fc.weight"], expected["fc.weight"], rtol=2**-7, atol=0)


def test_a_shape_that_no_knob_says_is_that_of_the_drafter(run: Run, target: HfTarget, tmp_path: Path) -> None:
    other = made(target)
    narrow = Eagle3(type(other.config)(**{**_fields(other), "intermediate_size": 64, "head_dim": 32}), target)

    algorithm = begun(run, target, stored(tmp_path / "narrow", narrow))

    assert (algorithm.config.intermediate_size, algorithm.config.head_dim) == (64, 32)
    assert_same(algorithm, narrow.drafter.state_dict())


def _fields(algorithm: Eagle3) -> dict[str, Any]:
    return {name: getattr(algorithm.config, name) for name in type(algorithm.config).__dataclass_fields__}


def test_every_wrong_option_is_named_with_what_it_must_be(run: Run, target: HfTarget, tmp_path: Path) -> None:
    folder = stored(tmp_path / "other", made(target, **OPTIONS))

    with pytest.raises(SettingsError) as refused:
        begun(run, target, folder, **{"eagle3.norm_before_residual": True, "eagle3.norm_output": True})

    said = str(refused.value).splitlines()
    assert said[1:-1] == [
        "  eagle3.draft_vocab_size = (unset): the drafter has 40",
        "  eagle3.style = llama: the drafter has qwen3",
        "  eagle3.fc_norm = false: the drafter has true",
        "  eagle3.norm_before_residual = true: the drafter has false",
    ]


def test_layers_that_the_drafter_does_not_read_are_refused(run: Run, target: HfTarget, tmp_path: Path) -> None:
    folder = native(tmp_path / "n", made(target), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})

    with pytest.raises(SettingsError, match=r"trainer.layers = \[2, 4, 6\]: the drafter has \[1, 3, 4\]"):
        begun(run, target, folder)


def test_auto_is_the_style_of_the_drafter(run: Run, target: HfTarget, tmp_path: Path) -> None:
    folder = stored(tmp_path / "other", made(target))

    assert begun(run, target, folder, **{"eagle3.style": "auto"}).config.style == "llama"


def test_a_drafter_of_another_target_is_refused(run: Run, target: HfTarget, tmp_path: Path) -> None:
    other = made(target)
    foreign = Eagle3(type(other.config)(**{**_fields(other), "vocab_size": 99, "num_target_layers": 4}), target)

    with pytest.raises(TargetError, match="vocab_size 99, not 2048; num_target_layers 4, not 8"):
        begun(run, target, stored(tmp_path / "foreign", foreign))


def test_an_embedding_that_is_not_the_targets_is_refused(run: Run, target: HfTarget, tmp_path: Path) -> None:
    folder = native(tmp_path / "n", made(target), eagle_aux_hidden_state_layer_ids=[3, 5, 7])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": target.embedding.roll(1, 0)}, folder / "model.safetensors")

    with pytest.raises(TargetError, match="an embedding of its own"):
        begun(run, target, folder)


def test_weights_that_are_missing_unknown_or_of_another_shape_are_each_named(
    run: Run, target: HfTarget, tmp_path: Path
) -> None:
    other = made(target)
    tensors = other.drafter.state_dict() | {"more.weight": torch.ones(2), "norm.weight": torch.ones(3)}
    del tensors["midlayer.mlp.up_proj.weight"]
    drafter.save(tmp_path / "other", other.config, tensors)

    with pytest.raises(DrafterError) as refused:
        begun(run, target, tmp_path / "other")

    assert [line.strip() for line in str(refused.value).splitlines()[1:]] == [
        "midlayer.mlp.up_proj.weight is missing",
        "more.weight is unknown",
        "norm.weight has shape (3,), it must be (192,)",
    ]


def test_a_head_that_was_trained_cannot_be_frozen(run: Run, target: HfTarget, tmp_path: Path) -> None:
    other = made(target)
    folder = stored(tmp_path / "other", other)
    assert begun(run, target, folder, **{"eagle3.head": "frozen"}).config.head == "frozen"
    with torch.no_grad():
        other.drafter.lm_head.weight[7].mul_(2)

    with pytest.raises(DrafterError, match=r"set eagle3\.head = own"):
        begun(run, target, stored(folder, other), **{"eagle3.head": "frozen"})


@pytest.mark.parametrize("content", [None, {}, {"config.json": "{}"}, {"config.json": "not json"}])
def test_a_folder_that_is_no_drafter_is_refused_by_name(
    run: Run, target: HfTarget, tmp_path: Path, content: dict[str, str] | None
) -> None:
    folder = tmp_path / "nothing"
    for name, text in (content or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if content == {}:
        folder.mkdir()

    with pytest.raises(DrafterError, match="nothing"):
        begun(run, target, folder)


def test_a_training_goes_on_from_another_drafters_folder_and_resumes_when_that_is_gone(
    tmp_path: Path, samples: Any, run: Run
) -> None:
    samples.put("train-000000")
    run.seal({})
    small = {"storage.url": run.storage.url, "trainer.batch_tokens": 64, "trainer.lr": 1e-9, "trainer.max_steps": 3}
    assert train(settings(**small), NEVER)
    first = run.drafter_dir("d")
    shutil.move(first, tmp_path / "moved")
    onwards = {**small, "trainer.seed": 1, "eagle3.start_from": str(tmp_path / "moved"), "trainer.drafter": "next"}

    assert train(settings(**onwards), NEVER)

    newest = checkpoint.latest(run.drafter_dir("next"))
    assert newest is not None
    began_with = checkpoint.read(tmp_path / "moved" / "checkpoints" / "step-000003").tensors
    for name, tensor in checkpoint.read(newest).tensors.items():
        torch.testing.assert_close(tensor, began_with[name], rtol=0, atol=1e-7)

    shutil.rmtree(tmp_path / "moved")
    (run.drafter_dir("next") / "drafter-settings.json").unlink()
    assert train(settings(**onwards | {"trainer.max_steps": 4}), NEVER)
