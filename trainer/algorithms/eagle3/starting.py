"""A drafter that training starts from: a folder of this trainer, or of an engine."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftfleet.errors import DrafterError
from trainer import checkpoint, drafter
from trainer.drafter import DrafterConfig

CONFIG, TENSORS = "config.json", "model.safetensors"

IMPORTERS = "trainer.export.importing"

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
)


def load(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """A drafter's folder in a run (its newest checkpoint), a checkpoint, or an engine's folder. Raises DrafterError."""
    if not folder.is_dir():
        raise DrafterError(f"eagle3.start_from = {folder}: there is no such folder on this machine.")
    if (folder / checkpoint.DRAFTER).exists():
        return drafter.load(folder)
    newest = checkpoint.latest(folder)
    if newest is not None:
        return drafter.load(newest)
    if find_spec(IMPORTERS) is not None:
        return import_module(IMPORTERS).load(folder)
    return _native(folder)


def _native(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """As vLLM and SGLang read it. Which norms there are is told by the tensors, whatever the configuration leaves out.

    vLLM's layer ids stand at the top level and name what enters a layer; SGLang's are nested and name what leaves it.
    """
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        tensors = {
            name.replace("layers.0.", "midlayer."): tensor for name, tensor in load_file(folder / TENSORS).items()
        }
        return _describe(config, tensors), tensors
    except KeyError as error:
        raise DrafterError(
            f"eagle3.start_from = {folder}: {CONFIG} has no {error.args[0]}, which a native EAGLE-3 drafter has."
        ) from None
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise DrafterError(f"eagle3.start_from = {folder} is not a drafter: {error}") from None


def _describe(config: dict[str, Any], tensors: dict[str, Tensor]) -> DrafterConfig:
    before = config.get("eagle_aux_hidden_state_layer_ids")
    layers = [layer - 1 for layer in before] if before else config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    size = config.get("draft_vocab_size") or config["vocab_size"]
    rope = config.get("rope_parameters") or {
        "rope_type": "default",
        **(config.get("rope_scaling") or {}),
        "rope_theta": config["rope_theta"],
    }
    return DrafterConfig(
        algorithm="eagle3",
        target="",
        layers=layers,
        num_target_layers=0,
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        hidden_act=config.get("hidden_act", "silu"),
        rope_parameters=rope,
        num_layers=config.get("num_hidden_layers", 1),
        style="qwen3" if "midlayer.self_attn.q_norm.weight" in tensors else "llama",
        draft_vocab_size=None if size == config["vocab_size"] else size,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_before_fc="input_norm.weight" in tensors,
        norm_output=bool(config.get("norm_output", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        **{name: config[name] for name in FIELDS},
    )
