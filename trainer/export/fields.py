"""The fields of config.json that describe a decoder: one meaning and one name in all formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.drafter import DrafterConfig

COPIED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",  # an engine drafts nothing beyond it
    "vocab_size",
)
"""Fields that have one name in drafter.json and in config.json."""

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

FOREIGN = (
    "add_swa_attention_sink_bias",
    "attention_sink_bias",
    "is_neox_style",
    "logit_scale",
    "projector_type",
    "quantization_config",
    "rope_is_neox_style",
    "text_config",
    "use_aux_norm",
    "use_gemma_norm",
)
"""What an engine would act on, and no drafter of ours does."""


def decoder(drafter: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The fields of a Llama or Qwen3 decoder, every one written: engines differ in what they make of a missing one."""
    style = "qwen3" if drafter.algorithm == "dflash" else drafter.style
    fields: dict[str, Any] = {
        "model_type": style,
        "num_hidden_layers": drafter.num_layers,
        **{name: getattr(drafter, name) for name in (*COPIED, *IDS)},
        "target_hidden_size": drafter.target_hidden_size,
        **_rope(drafter.rope_parameters),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        # Transformers 5 reads `dtype`, engines on Transformers 4 read `torch_dtype`.
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if style == "qwen3":
        kinds = layer_types(drafter)
        slides = "sliding_attention" in kinds
        fields |= {
            "layer_types": kinds,
            "sliding_window": drafter.sliding_window if slides else None,
            # Transformers' Qwen3 forgets sliding_window without it.
            "use_sliding_window": slides,
        }
    return fields


def layer_types(drafter: DrafterConfig) -> list[str]:
    return list(drafter.layer_types) or ["full_attention"] * drafter.num_layers


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """RoPE in both schemas: Transformers 5 drops the old one, and with it YaRN, in silence; engines still read it."""
    old = {name: value for name, value in parameters.items() if name != "rope_theta"}
    fields: dict[str, Any] = {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if old.get("rope_type", "default") == "default" else old,
    }
    if "partial_rotary_factor" in parameters:
        fields["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return fields


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a DrafterConfig that describe its decoder. Raises KeyError naming a field that is missing."""
    heads = config["num_attention_heads"]
    style = "qwen3" if config.get("model_type") == "qwen3" else "llama"
    return {
        **{name: config[name] for name in COPIED if name not in ("num_key_value_heads", "head_dim", "hidden_act")},
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_act": config.get("hidden_act") or "silu",
        **{name: config.get(name) for name in IDS},
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "rope_parameters": _read_rope(config),
        "style": style,
        "num_layers": config.get("num_hidden_layers", 1),
    }


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flat new schema; made of the old one where that is all there is."""
    parameters = config.get("rope_parameters")
    if parameters is not None:
        flat = dict(parameters.get("full_attention", parameters))
        if "rope_theta" not in flat:
            raise KeyError("rope_parameters.rope_theta")
        return flat
    if "rope_theta" not in config:
        raise KeyError("rope_parameters")
    old = dict(config.get("rope_scaling") or {})
    kind = old.pop("rope_type", None) or old.pop("type", None) or "default"
    old.pop("type", None)
    return {"rope_type": kind, "rope_theta": config["rope_theta"], **old}
