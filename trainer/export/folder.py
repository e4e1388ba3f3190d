"""What every exported folder holds, whoever serves it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from trainer.drafter import DrafterConfig

CONFIG, TENSORS, MANIFEST, CARD = "config.json", "model.safetensors", "export.json", "README.md"


@dataclass(frozen=True, slots=True)
class Verifier:
    """What a folder says of its target, or an engine's rules depend on."""

    name: str
    """Of the hub, or a path: what a serving command line names."""
    architectures: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """export.json: where a folder comes from, and what no engine's config.json has a place for."""

    format: str
    drafter: str
    step: int
    target: str
    target_architectures: list[str]
    num_target_layers: int
    layers_after: list[int]
    layers_before: list[int]
    trained: dict[str, Any]
    """Fields of drafter.json that only training reads."""
    draftfleet: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises OSError, ValueError or TypeError."""
        return cls(**json.loads((folder / MANIFEST).read_text()))

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """None if there is none that can be read: the folder is of another origin."""
        try:
            return cls.read(folder)
        except (OSError, ValueError, TypeError):
            return None


SERVED = (
    *("algorithm", "layers", "target_hidden_size", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("num_layers", "style", "draft_vocab_size", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"),
    *("block_size", "mask_token_id", "layer_types", "sliding_window", "causal"),
)
"""Fields of drafter.json that an engine must know. All others are of training alone."""


def trained(drafter: DrafterConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(drafter).items() if name not in SERVED}
