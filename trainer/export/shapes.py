"""The tensors of a drafter: names as in training, shapes and kinds. The embedding is the target's, none of them."""

# H hidden size of the drafter, D of the target, K chosen layers, I intermediate size, V vocabulary, d head size

from __future__ import annotations

from typing import NamedTuple

from trainer.drafter import DrafterConfig


class Shape(NamedTuple):
    sizes: tuple[int, ...]
    dtype: str = ""
    """Unset: that of the weights."""


EMBEDDING = "embed_tokens.weight"


def shapes(drafter: DrafterConfig) -> dict[str, Shape]:
    sizes = _dflash(drafter) if drafter.algorithm == "dflash" else _eagle3(drafter)
    tensors = {name: Shape(size) for name, size in sizes.items()}
    if is_reduced(drafter):
        tensors["d2t"] = Shape((draft_vocab_size(drafter),), "int64")
        tensors["t2d"] = Shape((drafter.vocab_size,), "bool")
    return tensors


def draft_vocab_size(drafter: DrafterConfig) -> int:
    return drafter.draft_vocab_size or drafter.vocab_size


def is_reduced(drafter: DrafterConfig) -> bool:
    """Whether it drafts from fewer tokens than the target has."""
    return draft_vocab_size(drafter) != drafter.vocab_size


def _eagle3(drafter: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The embedding of the next token comes first in the 2H that attention reads."""
    H, D = drafter.hidden_size, drafter.target_hidden_size
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(drafter.layers) * D),
        "midlayer.hidden_norm.weight": (H,),
        **_layer("midlayer", drafter, 2 * H, drafter.style == "qwen3"),
        "norm.weight": (H,),
        "lm_head.weight": (draft_vocab_size(drafter), H),
    }
    if drafter.fc_norm:
        sizes |= {f"fc_norm.{number}.weight": (D,) for number in range(len(drafter.layers))}
    if drafter.norm_before_fc:
        sizes["input_norm.weight"] = (len(drafter.layers) * D,)
    return sizes


def _dflash(drafter: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Neither an embedding nor a head: the target's."""
    H = drafter.hidden_size
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(drafter.layers) * drafter.target_hidden_size),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for number in range(drafter.num_layers):
        sizes |= _layer(f"layers.{number}", drafter, H, heads_are_normed=True)
    return sizes


def _layer(name: str, drafter: DrafterConfig, width: int, heads_are_normed: bool) -> dict[str, tuple[int, ...]]:
    """A decoder layer whose attention reads `width`."""
    H, I, d = drafter.hidden_size, drafter.intermediate_size, drafter.head_dim
    queries, keys = drafter.num_attention_heads * d, drafter.num_key_value_heads * d
    sizes: dict[str, tuple[int, ...]] = {
        f"{name}.input_layernorm.weight": (H,),
        f"{name}.self_attn.q_proj.weight": (queries, width),
        f"{name}.self_attn.k_proj.weight": (keys, width),
        f"{name}.self_attn.v_proj.weight": (keys, width),
        f"{name}.self_attn.o_proj.weight": (H, queries),
        f"{name}.post_attention_layernorm.weight": (H,),
        f"{name}.mlp.gate_proj.weight": (I, H),
        f"{name}.mlp.up_proj.weight": (I, H),
        f"{name}.mlp.down_proj.weight": (H, I),
    }
    if heads_are_normed:
        sizes |= {f"{name}.self_attn.q_norm.weight": (d,), f"{name}.self_attn.k_norm.weight": (d,)}
    return sizes
