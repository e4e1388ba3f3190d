"""Every target as the trainer loads it. To put another under the contract: a fixture of its name, and the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto import AutoModelForCausalLM

from draftfleet.settings import load
from trainer import targets
from trainer.targets import Row, Target, weights
from trainer.targets.hf import HfTarget

TINY = str(Path(__file__).parents[3] / "examples" / "tiny-target")
CPU = torch.device("cpu")
LAYERS = [2, 3, 6]  # none of them a default: those of engines would hide that ids were not handed on


def make_rows(*lengths: int, seed: int = 0, epoch: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Row(f"row-{seed}-{length}", torch.randint(0, 2048, (length,), generator=generator), torch.ones(length).bool(),
            epoch)
        for length in lengths
    ]  # fmt: skip


@pytest.fixture(scope="session")
def rows() -> Callable[..., list[Row]]:
    return make_rows


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Any]:
    def make(**flags: Any) -> Target:
        dotted = {name.replace("__", "."): value for name, value in flags.items()}
        return targets.load(load(flags={"target.path": TINY, "storage.min_free_gb": 0} | dotted), LAYERS, CPU)

    return make


@pytest.fixture(scope="session")
def reference() -> Any:
    """Hugging Face's own model, which no hook listens to."""
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def hf(make_target: Callable[..., Target]) -> Target:
    return make_target()


@pytest.fixture(scope="module")
def hf_dispatched(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """One whose weights lie in several places, as over several GPUs: half of its layers are read from disk on use."""
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "lm_head", "model.layers.0"), "cpu")
    places |= dict.fromkeys(("model.norm", "model.layers.3", "model.layers.6"), "disk")
    places |= {f"model.layers.{layer}": "cpu" for layer in (1, 2, 4, 5, 7)}
    model = weights.read(
        TINY, dtype=torch.float32, device_map=places, offload_folder=str(tmp_path_factory.mktemp("offloaded"))
    )
    assert model.model.layers[3].mlp.up_proj.weight.is_meta
    return HfTarget(model, LAYERS, TINY, weights.load(TINY, torch.float32, CPU))


@pytest.fixture(scope="module")
def cache(make_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Float32 is kept, so that its states equal the reference as closely as those of the others."""
    folder = str(tmp_path_factory.mktemp("cache"))
    return make_target(trainer__target="cache", cache__dir=folder, cache__dtype="float32", storage__url=folder)


@pytest.fixture(scope="module")
def cache_filled(make_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory) -> Target:
    """One that has nearly all rows of the tests already."""
    folder = str(tmp_path_factory.mktemp("filled"))
    flags = {"trainer__target": "cache", "cache__dir": folder, "cache__dtype": "float32", "storage__url": folder}
    first = make_target(**flags)
    for batch in CONTRACT_BATCHES:
        list(first.capture([batch]))
    return make_target(**flags)


CONTRACT_BATCHES = [make_rows(5, 70, 33, 1), make_rows(12, 40, seed=1), make_rows(9, seed=2)]
