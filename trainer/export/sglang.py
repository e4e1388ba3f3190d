"""SGLang: layer ids nested in `eagle_config`, as A ids; the engine adds 1 itself.

    trained on the outputs of layers   [1, 3, 4]   A ids, counted from 0
    written                            [1, 3, 4]

Read in SGLang 0.5.23. Its DeepSeek-V2 family (Kimi-K2 too) adds 1 only where the first id is 1: for such a target keep
a first layer of 1, which the default has.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

FOREIGN = ("eagle_aux_hidden_state_layer_ids", "dflash_config")
"""Other places where layer ids would contradict those in `eagle_config`."""


def write_layers(layers: list[int]) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}}


def read_layers(config: dict[str, Any]) -> list[int]:
    return [int(layer) for layer in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]


def last_layer(num_target_layers: int) -> int:
    """The deepest layer, as an A id, that the engine can hand out: it captures what enters a layer, so not the last."""
    return num_target_layers - 2


def serve_command(folder: Path, target: str, k: int) -> str:
    """A chain of `k` drafted tokens; the token that the target itself chose is counted among the draft tokens."""
    return shlex.join(
        [
            *("python", "-m", "sglang.launch_server", "--model-path", target),
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder)),
            *("--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(k + 1)),
        ]
    )
