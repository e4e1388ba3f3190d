"""The native EAGLE-3 folder that vLLM and SGLang both read: config.json and model.safetensors.

The engines agree on the tensors and on most of the configuration. They differ in how the layer ids are written, which
is what a format adds (trainer.export).

Every flag is written, since a flag that is left out means different things to different engines and releases. The
embedding is left out: both engines share the target's, and one that differs from it would be used as it is. The
vocabulary is the whole one, so there is no `d2t` and no `t2d`.
"""

# H hidden size of the drafter, D of the target, K chosen layers, I intermediate size, V vocabulary

from __future__ import annotations

from typing import Any

from trainer.drafter import DrafterConfig

CONFIG, TENSORS, MANIFEST = "config.json", "model.safetensors", "export.json"

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
    "target_hidden_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Fields that have one name in drafter.json and in config.json."""


def config(drafter: DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json without the layer ids."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(drafter, name) for name in COPIED},
        "draft_vocab_size": drafter.vocab_size,
        "num_aux_hidden_states": len(drafter.layers),
        **_rope(drafter.rope_parameters),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "norm_output": False,
        "fc_norm": False,
        "norm_before_fc": False,
        # Transformers 5 reads `dtype`, engines on Transformers 4 read `torch_dtype`.
        "dtype": dtype,
        "torch_dtype": dtype,
    }


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


def read(config: dict[str, Any], layers: list[int]) -> DrafterConfig:
    """The drafter that a config.json describes. It does not say how deep the target is (0) and what it is ("").

    Raises KeyError naming a field that is missing.
    """
    if "rope_theta" not in config["rope_parameters"]:
        raise KeyError("rope_parameters.rope_theta")
    return DrafterConfig(
        algorithm="eagle3",
        target="",
        layers=layers,
        num_target_layers=0,
        rope_parameters=config["rope_parameters"],
        **{name: config[name] for name in COPIED},
    )


def shapes(drafter: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The tensors, by name. The embedding of the next token comes first in the 2H that attention reads."""
    H, I, V = drafter.hidden_size, drafter.intermediate_size, drafter.vocab_size
    queries = drafter.num_attention_heads * drafter.head_dim
    keys = drafter.num_key_value_heads * drafter.head_dim
    return {
        "fc.weight": (H, len(drafter.layers) * drafter.target_hidden_size),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * H),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * H),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, queries),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (I, H),
        "midlayer.mlp.up_proj.weight": (I, H),
        "midlayer.mlp.down_proj.weight": (H, I),
        "norm.weight": (H,),
        "lm_head.weight": (V, H),
    }
