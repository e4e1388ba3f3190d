"""vLLM: layer ids at the top level, as B ids, used as they stand.

    trained on the outputs of layers   [1, 3, 4]   A ids, counted from 0
    written                            [2, 4, 5]   B ids: the stream that enters these layers

Read in vLLM 0.32: both of its model runners take the top-level list first. A nested `eagle_config` list is not written:
one runner would take it verbatim as B ids, the other not at all and fall back to [2, L/2, L-3] in silence.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

FOREIGN = ("eagle_config", "dflash_config", "target_layer_ids", "dspark_target_layer_ids")
"""Other places where one of vLLM's runners looks for layer ids."""


def write_layers(layers: list[int]) -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}


def read_layers(config: dict[str, Any]) -> list[int]:
    return [int(layer) - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]


def last_layer(num_target_layers: int) -> int:
    """The deepest layer, as an A id, that the engine can hand out."""
    return num_target_layers - 1


def serve_command(folder: Path, target: str, k: int) -> str:
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": k}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculation)])
