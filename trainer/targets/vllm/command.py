"""The command that starts a vLLM server for capturing: `draftfleet capture-command`.

vLLM counts layers by what goes *into* them, the input of a layer that is not there being the state before the final
norm. So our layer i is its i + 1, and the last state of L layers is its L.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from draftfleet.addresses import expand
from draftfleet.errors import TargetError
from draftfleet.settings import Settings

FOLDER = "/dev/shm/draftfleet"
"""Named where `capture.folder` is not set."""


def engine_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """A ids as vLLM counts them, with the last state: [1, 3] of 8 layers is [2, 4, 8].

    Layer 7 of 8 layers is the last state itself, and is not asked for twice.
    """
    return sorted({*(layer + 1 for layer in layers), num_layers})


def command(settings: Settings) -> str:
    """For the layers that the drafter of these settings sees. Raises TargetError without a target."""
    from trainer import algorithms  # noqa: PLC0415  it imports this package's table
    from trainer.targets import weights  # noqa: PLC0415

    weights.check_path(settings.target.path)
    layers = algorithms.layers_seen(settings)
    if layers is None:
        raise TargetError(f"target.path = {settings.target.path}: it has no config.json that says how deep it is.")
    return serve_command(settings, engine_layers(layers, _depth(settings.target.path)))


def serve_command(settings: Settings, layers: Sequence[int]) -> str:
    """`layers` as vLLM counts them. What depends on the machine, such as --tensor-parallel-size, is not in it."""
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": settings.capture.folder or FOLDER},
    }
    lines = [
        ["vllm", "serve", settings.target.path],
        ["--served-model-name", settings.model],
        ["--port", str(_port(settings))],
        ["--max-model-len", str(longest_row(settings) + 1)],
        ["--no-enable-prefix-caching"],
        ["--speculative-config", json.dumps(speculation)],
        ["--kv-transfer-config", json.dumps(transfer)],
    ]
    return " \\\n  ".join(shlex.join(line) for line in lines)


def longest_row(settings: Settings) -> int:
    """Tokens of the longest row that can be asked for."""
    return min(settings.trainer.max_length, settings.trainer.batch_tokens)


def _depth(path: str) -> int:
    from transformers import AutoConfig  # noqa: PLC0415  a second

    return AutoConfig.from_pretrained(path).get_text_config().num_hidden_layers


def _port(settings: Settings) -> int:
    servers = expand(settings.capture.servers, "capture.servers")
    return int(servers[0].url.rpartition(":")[2].partition("/")[0]) if servers else 8100
