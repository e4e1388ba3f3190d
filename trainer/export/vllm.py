"""vLLM's own format: EAGLE-3's layer ids at the top level, as B ids, used as they stand; DFlash as z-lab writes it.

    trained on the outputs of layers   [1, 3, 4]   A ids, counted from 0
    EAGLE-3                            [2, 4, 5]   B ids: the stream that enters these layers
    DFlash                             [1, 3, 4]   A ids: the engine adds 1

Read in vLLM 0.32: both of its model runners take the top-level list first. A nested `eagle_config` list is not written:
one runner would take it verbatim as B ids, the other not at all and fall back to [2, L/2, L-3] in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.drafter import DrafterConfig
from trainer.export import native
from trainer.export.folder import Verifier
from trainer.export.native import WITH_EMBEDDING, tensor_name

__all__ = ["WITH_EMBEDDING", "tensor_name"]

FOREIGN = (*native.FOREIGN, "eagle_config", "dflash_config", "eagle_aux_hidden_state_layer_ids")
"""Other places where one of vLLM's runners looks for layer ids, of the algorithm or of the other one."""

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}


def config(drafter: DrafterConfig, dtype: str, target: Verifier) -> dict[str, Any]:
    if drafter.algorithm == "dflash":
        return native.dflash(drafter, dtype)
    return {
        "architectures": [ARCHITECTURES[drafter.style]],
        **native.eagle3(drafter, dtype),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in drafter.layers],
    }


def read(config: Mapping[str, Any], target: Verifier) -> DrafterConfig:
    if "DFlashDraftModel" in config.get("architectures", []):
        return native.read_dflash(config)
    return native.read_eagle3(config, [int(layer) - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]])


def refusals(drafter: DrafterConfig, target: Verifier) -> Iterator[str]:
    last = drafter.num_target_layers - 1
    if drafter.num_target_layers and max(drafter.layers, default=0) > last:
        yield f"layers (A ids) are {drafter.layers}, the last that the engine hands out of this target is {last}"


def serve_command(folder: Path, drafter: DrafterConfig, target: str, k: int) -> list[str]:
    speculation = {"method": drafter.algorithm, "model": str(folder), "num_speculative_tokens": k}
    command = ["vllm", "serve", target, "--speculative-config", json.dumps(speculation)]
    # Layers of two kinds need two groups of its cache, which only the newer runner has.
    mixed = len(set(drafter.layer_types)) > 1
    return ["env", "VLLM_USE_V2_MODEL_RUNNER=1", *command] if mixed else command
