"""A drafter folder of our own: drafter.json and drafter.safetensors. Checkpoints hold one; exports are made from one.

Tensor names are those of the native EAGLE-3 format that vLLM and SGLang read: `fc.weight`, `midlayer.*`, `norm.weight`,
`lm_head.weight`. The embedding is the target's and is not stored. A reduced vocabulary has two more: `d2t` (int64) is
what to add to a draft id for the target's id, `t2d` (bool) whether a token of the target can be drafted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    num_layers: int = 1
    style: Literal["llama", "qwen3"] = "llama"
    """qwen3: queries and keys of each head are normed."""
    draft_vocab_size: int | None = None
    """None: the whole vocabulary."""

    # EAGLE-3
    ttt_steps: int = 3
    step_decay: float = 0.8
    loss: Literal["soft_ce", "forward_kl", "lk"] = "soft_ce"
    head: Literal["own", "frozen"] = "own"
    """frozen: the rows of the target's head, not trained."""
    norm_before_residual: bool = False
    """The residual of the layer begins with the normed hidden state."""
    norm_before_fc: bool = False
    """One norm over all chosen layers side by side."""
    norm_output: bool = False
    """What passes to the next draft step is normed."""
    fc_norm: bool = False
    """A norm for each chosen layer."""
    begins_at: float | None = None
    """Standard deviation of the matrices before the first step. None: 1 / sqrt(inputs)."""

    # DFlash
    block_size: int = 0
    mask_token_id: int = -1
    layer_types: list[str] = field(default_factory=list[str])
    sliding_window: int | None = None
    causal: bool | None = None
    """Whether a slot sees only the slots before it. None: in sliding layers alone, as engines take it."""
    anchors: int = 512
    anchor_share: float = 1.0
    soft_labels: bool = False
    slot_weights: Literal["decay", "dpace"] = "decay"
    slot_decay: float = 4.0
    dpace_alpha: float = 0.5

    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of a draft as it was trained."""
        return self.block_size - 1 if self.block_size else self.ttt_steps


def save(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    """Write a drafter folder. Not atomic: the caller puts the folder in place."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drafter.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    save_file(
        {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, folder / "drafter.safetensors"
    )


def load(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Raises DrafterError if the folder is not a drafter."""
    config = load_config(folder)
    try:
        return config, load_file(folder / "drafter.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise DrafterError(f"{folder} is not a drafter of draftfleet: {error}.") from None


def load_config(folder: Path) -> DrafterConfig:
    """Fields that an older version did not know have their defaults. Raises DrafterError."""
    try:
        return DrafterConfig(**json.loads((folder / "drafter.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DrafterError(f"{folder} is not a drafter of draftfleet: {error}.") from None
