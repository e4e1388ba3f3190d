"""What a drafter takes over from its target: width, heads, positions, vocabulary."""

from __future__ import annotations

from typing import Any

from draftfleet.settings import Settings
from trainer.targets import Target

OF_THE_TARGET_ALONE = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def of_target(settings: Settings, target: Target) -> dict[str, Any]:
    """Fields of DrafterConfig, for any algorithm."""
    config = target.config
    return {
        "target": settings.target.path,
        "layers": target.layers,
        "num_target_layers": config.num_hidden_layers,
        "target_hidden_size": config.hidden_size,
        "vocab_size": len(target.embedding),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope_parameters(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def rope_parameters(config: Any) -> dict[str, Any]:
    """The target's base and scaling, in the flat form; of full attention, where kinds of layers differ.

    What only the target's own attention does is left out: turning a part of each head, positions of images. An engine
    that reads it would draft otherwise than was trained.
    """
    parameters = dict(config.rope_parameters)
    flat = dict(parameters.get("full_attention", parameters))
    return {name: value for name, value in flat.items() if name not in OF_THE_TARGET_ALONE}
