"""A drafter folder of our own: drafter.json and drafter.safetensors. Checkpoints hold one; exports are made from one.

Tensor names are those of the native EAGLE-3 format that vLLM and SGLang read: `fc.weight`, `midlayer.*`, `norm.weight`,
`lm_head.weight`. The embedding is the target's and is not stored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftfleet.errors import DrafterError


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """The shape of a drafter and what it must know of its target. Layer ids are A ids (trainer.targets)."""

    algorithm: str
    target: str
    layers: list[int]
    num_target_layers: int
    target_hidden_size: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    ttt_steps: int = 3
    step_decay: float = 0.8
    extra: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    """Write a drafter folder. Not atomic: the caller puts the folder in place."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drafter.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    save_file(
        {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, folder / "drafter.safetensors"
    )


def load(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Raises DrafterError if the folder is not a drafter."""
    try:
        config = DrafterConfig(**json.loads((folder / "drafter.json").read_text()))
        return config, load_file(folder / "drafter.safetensors")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise DrafterError(f"{folder} is not a drafter of draftfleet: {error}.") from None
