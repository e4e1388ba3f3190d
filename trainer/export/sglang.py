"""SGLang: EAGLE-3's layer ids nested in `eagle_config`, as A ids, to which the engine adds 1; DFlash as z-lab has it.

    trained on the outputs of layers   [1, 3, 4]   A ids, counted from 0
    written                            [1, 3, 4]

Read in SGLang 0.5.23. Its rules, with the file that has each:

    models/llama_eagle3.py        the residual is what `hidden_norm` reads, never what it puts out; no norm of heads;
                                  `fc` is skipped where the states are as wide as the embedding, so for a single layer;
                                  unknown tensors are skipped, missing ones stay random; a draft vocabulary of null
                                  takes the target's head
    models/llama.py               an embedding is shared only with a target of the drafter's own width
    models/deepseek_v2.py         adds 1 to EAGLE-3's ids only where the first one is 1, else takes them as B ids;
                                  Kimi-K2's family runs through it, and glm4_moe_lite.py does the same
    models/dflash.py              `fc` as wide as layers times the width; layers of full or sliding attention; SiLU;
                                  no head and no vocabulary of its own
    speculative/dflash_utils.py   layers within the target; a sliding window where a layer slides; the mask's id an
                                  integer of the vocabulary
    models/*.py                   captures what enters a layer, so never the output of the last one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.drafter import DrafterConfig
from trainer.export import native
from trainer.export.folder import Verifier
from trainer.export.native import WITH_EMBEDDING, tensor_name

__all__ = ["WITH_EMBEDDING", "tensor_name"]

FOREIGN = (*native.FOREIGN, "eagle_aux_hidden_state_layer_ids", "eagle_config", "dflash_config")

DEEPSEEK = ("DeepseekV", "KimiK2", "KimiVL", "MistralLarge3", "GlmMoeDsa", "Glm4MoeLite", "DotsVLM")
"""How the architectures begin whose EAGLE-3 ids go through deepseek_v2.py or glm4_moe_lite.py."""


def config(drafter: DrafterConfig, dtype: str, target: Verifier) -> dict[str, Any]:
    if drafter.algorithm == "dflash":
        return native.dflash(drafter, dtype)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **native.eagle3(drafter, dtype),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer + _shift(drafter.layers, target) for layer in drafter.layers],
            "use_aux_hidden_state": True,
        },
    }


def _shift(layers: list[int], target: Verifier) -> int:
    """What the engine does not add itself."""
    return int(is_deepseek(target) and layers[:1] != [1])


def is_deepseek(target: Verifier) -> bool:
    return any(name.startswith(DEEPSEEK) for name in target.architectures)


def read(config: Mapping[str, Any], target: Verifier) -> DrafterConfig:
    if "DFlashDraftModel" in config.get("architectures", []):
        return native.read_dflash(config)
    written = [int(layer) for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    return native.read_eagle3(config, [layer - _shift(written, target) for layer in written])


def refusals(drafter: DrafterConfig, target: Verifier) -> Iterator[str]:
    layers, last = drafter.layers, drafter.num_target_layers - 2
    if drafter.num_target_layers and max(layers, default=0) > last:
        yield f"layers (A ids) are {layers}, the last that the engine hands out of this target is {last}"
    if drafter.algorithm == "dflash":
        if drafter.hidden_act != "silu":
            yield f"hidden_act is {drafter.hidden_act}, the engine has only silu"
        return
    if drafter.norm_before_residual:
        yield "norm_before_residual is true, and the engine knows no such flag: it would add the residual unnormed"
    if drafter.style == "qwen3":
        yield "style is qwen3, and the engine has no norms of heads: it would leave them out"
    if len(layers) * drafter.target_hidden_size == drafter.hidden_size:
        yield f"layers (A ids) are {layers}: the engine skips fc where it puts in as much as it puts out"
    if is_deepseek(target) and layers[:1] == [0]:
        yield (
            f"layers (A ids) are {layers}: of a target like {', '.join(target.architectures)} the engine cannot be "
            "asked for layer 0 first"
        )


def serve_command(folder: Path, drafter: DrafterConfig, target: str, k: int) -> list[str]:
    """A chain of `k` drafted tokens; the token that the target itself chose is counted among the draft tokens."""
    launch = ["python", "-m", "sglang.launch_server", "--model-path", target]
    if drafter.algorithm == "dflash":
        return [
            *launch,
            *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(folder)),
            *("--speculative-num-draft-tokens", str(k + 1)),
        ]
    return [
        *launch,
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder)),
        *("--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(k + 1)),
    ]
