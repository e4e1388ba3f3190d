"""Drafters of every recipe with random weights, in the names of training, and checkpoints of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer import checkpoint
from trainer.checkpoint import State
from trainer.data import Journal
from trainer.drafter import DrafterConfig

H, D, INNER, V, Q, KV, HEAD = 64, 64, 96, 128, 4 * 32, 2 * 32, 32

Edit = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Drafter:
    config: DrafterConfig
    tensors: dict[str, Tensor]


def shared(**changes: Any) -> dict[str, Any]:
    return {
        "target": "",
        "num_target_layers": 8,
        "target_hidden_size": D,
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
        **changes,
    }


def layer_shapes(name: str, width: int, heads_are_normed: bool) -> dict[str, tuple[int, ...]]:
    """Written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.input_layernorm.weight": (H,),
        f"{name}.self_attn.q_proj.weight": (Q, width),
        f"{name}.self_attn.k_proj.weight": (KV, width),
        f"{name}.self_attn.v_proj.weight": (KV, width),
        f"{name}.self_attn.o_proj.weight": (H, Q),
        f"{name}.post_attention_layernorm.weight": (H,),
        f"{name}.mlp.gate_proj.weight": (INNER, H),
        f"{name}.mlp.up_proj.weight": (INNER, H),
        f"{name}.mlp.down_proj.weight": (H, INNER),
    }
    if heads_are_normed:
        shapes |= {f"{name}.self_attn.q_norm.weight": (HEAD,), f"{name}.self_attn.k_norm.weight": (HEAD,)}
    return shapes


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(7)
    return {
        name: 1 + torch.randn(shape, generator=dice) * 0.1
        if len(shape) == 1
        else torch.randn(shape, generator=dice) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }


def eagle3(**changes: Any) -> Drafter:
    config = DrafterConfig(**shared(algorithm="eagle3", **{"layers": [0, 2, 5], **changes}))
    size = config.draft_vocab_size or V
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(config.layers) * D),
        "midlayer.hidden_norm.weight": (H,),
        **layer_shapes("midlayer", 2 * H, config.style == "qwen3"),
        "norm.weight": (H,),
        "lm_head.weight": (size, H),
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{number}.weight": (D,) for number in range(len(config.layers))}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (len(config.layers) * D,)
    tensors = weights(shapes)
    if size != V:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:size].sort().values
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.isin(torch.arange(V), ids)
    return Drafter(config, tensors)


def dflash(**changes: Any) -> Drafter:
    values = {"layers": [1, 3, 5], "num_layers": 2, "block_size": 8, "mask_token_id": 7, "style": "qwen3"}
    values |= {"layer_types": ["full_attention"] * 2, "causal": None}
    config = DrafterConfig(**shared(algorithm="dflash", **(values | changes)))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(config.layers) * D),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for number in range(config.num_layers):
        shapes |= layer_shapes(f"layers.{number}", H, heads_are_normed=True)
    return Drafter(config, weights(shapes))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """As much of a target's folder as an export reads."""
    folder = tmp_path / "toy-target"
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# toy-target\n")
    embedding = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    return folder


@pytest.fixture
def make(target: Path) -> Callable[..., Drafter]:
    """`make("eagle3", fc_norm=True)`"""
    makers = {"eagle3": eagle3, "dflash": dflash}
    return lambda algorithm="eagle3", **changes: makers[algorithm](**{"target": str(target), **changes})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(flags={"run": "demo", "storage.url": str(tmp_path / "storage"), "export.dtype": "float32"})


@pytest.fixture
def run(settings: Settings) -> Run:
    return Run.create(open_storage(settings.storage.url), settings.run, {}, {})


@pytest.fixture
def put(settings: Settings, run: Run, make: Callable[..., Drafter]) -> Callable[..., Path]:
    """`put(drafter, 200)` writes a checkpoint of step 200."""

    def write(drafter: Drafter | None = None, step: int = 200) -> Path:
        made = drafter or make()
        return checkpoint.write(
            run.drafter_dir(settings.trainer.drafter),
            config=made.config,
            tensors=made.tensors,
            state=State(step=step),
            optimizer={},
            journal=Journal(),
            keep=9,
        )

    return write


@dataclass(frozen=True)
class Folder:
    """An exported folder, to look into and to damage."""

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    @property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.path / "model.safetensors")

    def edit(self, edit: Edit) -> None:
        config = self.config
        edit(config)
        (self.path / "config.json").write_text(json.dumps(config))

    def edit_tensors(self, edit: Edit) -> None:
        tensors = self.tensors
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.path / "model.safetensors")


@pytest.fixture
def look() -> type[Folder]:
    return Folder
