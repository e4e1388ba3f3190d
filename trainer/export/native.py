"""The native folders that vLLM and SGLang both read: EAGLE-3 without its layer ids, and DFlash whole.

The engines agree on the tensors, on most of EAGLE-3's configuration and on all of DFlash's, which is z-lab's. Where
EAGLE-3's layer ids stand and how they count is what a format adds.

    causality of DFlash, as both engines find it   is_causal, else (vLLM) dflash_config.causal, else
                                                   a layer of sliding attention is causal, one of full attention is not
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.drafter import DrafterConfig
from trainer.export import fields
from trainer.export.shapes import draft_vocab_size

FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
SLIDING = "sliding_attention"
WITH_EMBEDDING: tuple[str, ...] = ()
"""Both engines share the target's, and one that differs from it would be used as it is."""

FOREIGN = (*fields.FOREIGN, "target_layer_ids", "dspark_target_layer_ids", "is_causal", "mask_token")
UNKNOWN = (
    "conv_kernel_size",
    "selector_rank",
    "projector_type",
    "attention_sink_bias",
    "attention_value_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "use_swa",
    "sample_from_anchor",
)
"""What `dflash_config` may ask for and no drafter of ours does."""


def eagle3(drafter: DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json of EAGLE-3 without the layer ids and the architecture."""
    return {
        **fields.decoder(drafter, dtype),
        "draft_vocab_size": draft_vocab_size(drafter),
        "num_aux_hidden_states": len(drafter.layers),
        **{name: getattr(drafter, name) for name in FLAGS},
    }


def read_eagle3(config: Mapping[str, Any], layers: list[int]) -> DrafterConfig:
    vocab_size = config["vocab_size"]
    size = config.get("draft_vocab_size")
    return DrafterConfig(
        algorithm="eagle3",
        target="",
        layers=layers,
        num_target_layers=0,
        draft_vocab_size=None if size in (None, vocab_size) else size,
        **{name: bool(config.get(name)) for name in FLAGS},
        **fields.read(config),
    )


def dflash(drafter: DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json of DFlash. The mask's id and the block's size stand in both places where an engine looks."""
    inner: dict[str, Any] = {
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.layers),
        "block_size": drafter.block_size,
        "use_aux_hidden_state": True,
        "sample_from_anchor": False,
    }
    outer: dict[str, Any] = {}
    if (causal := causality(drafter)) is not None:
        inner["causal"] = outer["is_causal"] = causal
    return {
        "architectures": ["DFlashDraftModel"],
        **fields.decoder(drafter, dtype),
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "num_target_layers": drafter.num_target_layers or None,
        **outer,
        "dflash_config": inner,
    }


def causality(drafter: DrafterConfig) -> bool | None:
    """Whether the slots of a block see only those before them, in all layers; None if layers differ in it."""
    if drafter.causal is not None:
        return drafter.causal
    return _default_causality(fields.layer_types(drafter))


def _default_causality(kinds: list[str]) -> bool | None:
    each = {kind == SLIDING for kind in kinds}
    return each.pop() if len(each) == 1 else None


def read_dflash(config: Mapping[str, Any]) -> DrafterConfig:
    inner = config.get("dflash_config") or {}
    for name in UNKNOWN:
        if inner.get(name):
            raise ValueError(f"dflash_config.{name} = {inner[name]!r}: no drafter of draftfleet has that")
    layers = inner.get("target_layer_ids") or config.get("target_layer_ids")
    if not layers:
        raise KeyError("dflash_config.target_layer_ids")
    mask = inner.get("mask_token_id", config.get("mask_token_id"))
    if mask is None:
        raise KeyError("dflash_config.mask_token_id")
    block = inner.get("block_size") or config.get("block_size")
    if block is None:
        raise KeyError("block_size")
    decoder: dict[str, Any] = {**fields.read(config), "style": "qwen3"}
    flag = config.get("is_causal")
    causal = flag if flag is not None else inner.get("causal")
    return DrafterConfig(
        algorithm="dflash",
        target="",
        layers=[int(layer) for layer in layers],
        num_target_layers=inner.get("num_target_layers") or config.get("num_target_layers") or 0,
        block_size=block,
        mask_token_id=mask,
        **attention(config, causal),
        **decoder,
    )


def attention(config: Mapping[str, Any], causal: bool | None) -> dict[str, Any]:
    """Kinds of layers and their causality, `causal` being what a flag says of all of them."""
    kinds = list(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])
    return {
        "layer_types": kinds,
        "sliding_window": config.get("sliding_window") if SLIDING in kinds else None,
        "causal": None if causal is None or causal == _default_causality(kinds) else bool(causal),
    }


def tensor_name(name: str) -> str:
    """As in training."""
    return name
