"""The format of speculators, which vLLM reads as well: layer ids as B ids for both algorithms, the target named inside.

    trained on the outputs of layers   [1, 3, 4]   A ids, counted from 0
    written                            [2, 4, 5]   B ids; vLLM takes 1 off again for DFlash

Read in speculators 0.9.0 and vLLM 0.32. For DFlash embedding and head are left out: speculators loads them from the
target that `verifier.name_or_path` names, vLLM shares those of the target that it serves. For EAGLE-3 the embedding is
written: without it speculators takes what is in memory by chance, if that has no NaN, for an embedding.

Causality of DFlash: speculators says by `sliding_window_non_causal` whether layers of sliding attention are free of it
and has it never in full attention; vLLM takes the flag for all layers. So it is true where no layer is causal and false
where all are and slide. A drafter whose layers differ could be written for speculators' trainer or for vLLM, not for
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.drafter import DrafterConfig
from trainer.export import fields, native, vllm
from trainer.export.folder import Verifier
from trainer.export.shapes import draft_vocab_size

FOREIGN = (*fields.FOREIGN, "eagle_config", "dflash_config", "target_layer_ids", "model_type")
VERSION = "0.9.0"
CLASSES = {"eagle3": "Eagle3Speculator", "dflash": "DFlashSpeculator"}

WITH_EMBEDDING = ("eagle3",)

serve_command = vllm.serve_command


def config(drafter: DrafterConfig, dtype: str, target: Verifier) -> dict[str, Any]:
    is_dflash = drafter.algorithm == "dflash"
    decoder = fields.decoder(drafter, dtype)
    shared = {
        "architectures": [CLASSES[drafter.algorithm]],
        "speculators_model_type": drafter.algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": drafter.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": drafter.block_size - 1 if is_dflash else drafter.ttt_steps,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "draft_vocab_size": draft_vocab_size(drafter),
        "target_hidden_size": drafter.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    before = [layer + 1 for layer in drafter.layers]
    if is_dflash:
        return {
            **shared,
            "transformer_layer_config": decoder,
            "aux_hidden_state_layer_ids": before,
            "block_size": drafter.block_size,
            "mask_token_id": drafter.mask_token_id,
            "sliding_window_non_causal": not native.causality(drafter),
            "sample_from_anchor": False,
        }
    return {
        **shared,
        # vLLM takes three layers for granted unless the inner table counts them.
        "transformer_layer_config": {**decoder, "num_aux_hidden_states": len(drafter.layers)},
        "eagle_aux_hidden_state_layer_ids": before,
        **{name: getattr(drafter, name) for name in native.FLAGS},
        "embed_requires_grad": False,
    }


def read(config: Mapping[str, Any], target: Verifier) -> DrafterConfig:
    decoder = config["transformer_layer_config"]
    said = config["speculators_config"]
    shared: dict[str, Any] = {
        **fields.read(decoder),
        "target": said["verifier"]["name_or_path"] or "",
        "num_target_layers": 0,
    }
    size = config.get("draft_vocab_size")
    shared["draft_vocab_size"] = None if size in (None, decoder["vocab_size"]) else size
    match config["speculators_model_type"]:
        case "eagle3":
            return DrafterConfig(
                algorithm="eagle3",
                layers=[int(layer) - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]],
                ttt_steps=said["proposal_methods"][0]["speculative_tokens"],
                # Left out, it is true for vLLM and false for speculators.
                norm_before_residual=bool(config["norm_before_residual"]),
                **{name: bool(config.get(name)) for name in native.FLAGS if name != "norm_before_residual"},
                **shared,
            )
        case "dflash":
            if config.get("sample_from_anchor"):
                raise ValueError("sample_from_anchor is true: no drafter of draftfleet drafts from its anchor")
            shared["style"] = "qwen3"
            free = bool(config.get("sliding_window_non_causal"))
            return DrafterConfig(
                algorithm="dflash",
                layers=[int(layer) - 1 for layer in config["aux_hidden_state_layer_ids"]],
                block_size=config["block_size"],
                mask_token_id=config["mask_token_id"],
                **native.attention(decoder, False if free else None),
                **shared,
            )
        case other:
            raise ValueError(f"speculators_model_type = {other!r}: draftfleet has eagle3 and dflash")


def tensor_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def refusals(drafter: DrafterConfig, target: Verifier) -> Iterator[str]:
    yield from vllm.refusals(drafter, target)
    if not target.name:
        yield "the target has no name: set target.path or export.target_name"
    if drafter.algorithm == "eagle3":
        if drafter.fc_norm and drafter.norm_before_fc:
            yield "fc_norm and norm_before_fc are both true, and speculators takes one of them"
    elif (causal := native.causality(drafter)) is None:
        yield (
            "its layers of full attention see the whole block and those of sliding attention do not: vLLM reads one "
            "flag for both; use the format vllm"
        )
    elif causal and "full_attention" in fields.layer_types(drafter):
        yield "causal is true, and full attention of speculators is never causal"
