"""Refuse a drafter folder that an engine would load and serve wrongly.

Engines are lenient where it hurts: SGLang skips unknown tensors and leaves missing ones random; vLLM falls back to
default layers. Neither says so; the drafter is just accepted less often. So nothing is left to them: every name, shape,
type, number, flag and layer id must be what a drafter of that shape has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from draftfleet.errors import DrafterError
from trainer.drafter import DrafterConfig
from trainer.export import native
from trainer.export.formats import Format, format_named


def check(folder: Path, format_name: str, drafter: DrafterConfig | None = None) -> None:
    """Raises DrafterError with every problem of the folder, one a line.

    Without `drafter` the configuration must agree with itself; with it, it must describe just that drafter.
    """
    problems = list(_problems(folder, format_named(format_name), drafter))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise DrafterError(
            f"{folder} is not an EAGLE-3 drafter that {format_name} would serve as it was trained:\n{lines}\n"
            "Export it again with `draftfleet export`."
        )


def _problems(folder: Path, format: Format, drafter: DrafterConfig | None) -> Iterator[str]:
    try:
        config = json.loads((folder / native.CONFIG).read_text())
    except (OSError, ValueError) as error:
        yield f"{native.CONFIG} cannot be read: {error}"
        return
    if not isinstance(config, dict):
        yield f"{native.CONFIG} holds {type(config).__name__}, not an object"
        return
    try:
        described = native.read(config, format.read_layers(config))
        expected = {
            **native.config(drafter or described, config["dtype"]),
            **format.write_layers((drafter or described).layers),
        }
    except KeyError as error:
        yield f"{native.CONFIG}: {error.args[0]} is missing"
        return
    except (TypeError, ValueError) as error:
        yield f"{native.CONFIG}: {error}"
        return
    yield from _config_problems(config, expected, format)
    yield from _layer_problems(drafter or described, format)
    yield from _tensor_problems(folder / native.TENSORS, drafter or described, config["dtype"])


def _config_problems(config: dict[str, Any], expected: dict[str, Any], format: Format) -> Iterator[str]:
    for key, value in expected.items():
        if key not in config:
            yield f"{native.CONFIG}: {key} is missing, it must be {json.dumps(value)}"
        elif config[key] != value:
            yield f"{native.CONFIG}: {key} is {json.dumps(config[key])}, it must be {json.dumps(value)}"
    for key in format.FOREIGN:
        if config.get(key) is not None:
            yield f"{native.CONFIG}: {key} = {json.dumps(config[key])} may not be there"
    if config["hidden_size"] != config["target_hidden_size"]:
        yield (
            f"{native.CONFIG}: hidden_size is {config['hidden_size']}, it must be target_hidden_size = "
            f"{config['target_hidden_size']}: the embedding is the target's"
        )


def _layer_problems(drafter: DrafterConfig, format: Format) -> Iterator[str]:
    layers = drafter.layers
    if not layers or sorted(set(layers)) != layers or layers[0] < 0:
        yield f"layers (A ids) are {layers}, they must ascend from 0 on"
    last = format.last_layer(drafter.num_target_layers)
    if drafter.num_target_layers and layers and layers[-1] > last:
        yield f"layers (A ids) are {layers}, the last that the engine hands out of this target is {last}"


def _tensor_problems(path: Path, drafter: DrafterConfig, dtype: str) -> Iterator[str]:
    expected = native.shapes(drafter)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            yield from (f"{path.name}: {name} is missing" for name in expected if name not in names)
            yield from (f"{path.name}: {name} may not be there" for name in sorted(names - expected.keys()))
            for name in expected:
                if name in names:
                    yield from _one_tensor(f"{path.name}: {name}", file.get_tensor(name), expected[name], dtype)
    except (OSError, SafetensorError) as error:
        yield f"{path.name} cannot be read: {error}"


def _one_tensor(where: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> Iterator[str]:
    if tuple(tensor.shape) != shape:
        yield f"{where} has shape {tuple(tensor.shape)}, it must be {shape}"
    if str(tensor.dtype) != f"torch.{dtype}":
        yield f"{where} is {str(tensor.dtype).removeprefix('torch.')}, config.json says {dtype}"
    num_broken = int((~torch.isfinite(tensor)).sum())
    if num_broken:
        yield f"{where} has {num_broken} values that are not finite"
