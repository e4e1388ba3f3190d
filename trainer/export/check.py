"""Refuse a drafter folder that an engine would load and serve wrongly.

Engines are lenient where it hurts: SGLang skips unknown tensors and leaves missing ones random; vLLM falls back to
default layers. Neither says so; the drafter is just accepted less often. So nothing is left to them: every name, shape,
type, number, flag and layer id must be what a drafter of that shape has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftfleet.errors import DrafterError
from trainer.drafter import DrafterConfig
from trainer.export import fields, native
from trainer.export.folder import CONFIG, TENSORS, Manifest, Verifier
from trainer.export.formats import Format, format_named
from trainer.export.shapes import EMBEDDING, Shape, is_reduced, shapes

ABSENT = object()


def check(folder: Path, format_name: str, drafter: DrafterConfig | None = None) -> None:
    """Raises DrafterError with every problem of the folder, one a line.

    Without `drafter` the configuration must agree with itself; with it, it must describe just that drafter.
    """
    problems = list(_problems(folder, format_named(format_name), drafter))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise DrafterError(
            f"{folder} is not a drafter that {format_name} would serve as it was trained:\n{lines}\n"
            "Export it again with `draftfleet export`."
        )


def refusals(drafter: DrafterConfig, format_name: str, target: Verifier) -> list[str]:
    """Why no folder of this format can hold the drafter: none, in most cases."""
    return [*refusals_of_all(drafter), *format_named(format_name).refusals(drafter, target)]


def _problems(folder: Path, format: Format, drafter: DrafterConfig | None) -> Iterator[str]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        yield f"{CONFIG} cannot be read: {error}"
        return
    if not isinstance(config, dict):
        yield f"{CONFIG} holds {type(config).__name__}, not an object"
        return
    target = _target(folder, config)
    try:
        described = drafter or format.read(config, target)
        expected = format.config(described, config["dtype"], target)
    except KeyError as error:
        yield f"{CONFIG}: {error.args[0]} is missing"
        return
    except (TypeError, ValueError) as error:
        yield f"{CONFIG}: {error}"
        return
    yield from _config_problems(config, expected, format)
    yield from refusals_of_all(described)
    yield from format.refusals(described, target)
    names = {format.tensor_name(name): shape for name, shape in shapes(described).items()}
    if described.algorithm in format.WITH_EMBEDDING:
        names[EMBEDDING] = Shape((described.vocab_size, described.hidden_size))
    yield from _tensor_problems(folder / TENSORS, names, config["dtype"])


def _target(folder: Path, config: Mapping[str, Any]) -> Verifier:
    """As export.json says; of a folder of another origin, as far as its own words go."""
    manifest = Manifest.find(folder)
    if manifest is not None:
        return Verifier(manifest.target, manifest.target_architectures)
    try:
        verifier = config["speculators_config"]["verifier"]
        return Verifier(verifier["name_or_path"] or "", list(verifier["architectures"]))
    except (KeyError, TypeError):
        return Verifier("")


def _config_problems(config: Mapping[str, Any], expected: Mapping[str, Any], format: Format) -> Iterator[str]:
    yield from _differences("", config, expected)
    for key in format.FOREIGN:
        if key not in expected and config.get(key) is not None:
            yield f"{CONFIG}: {key} = {json.dumps(config[key])} may not be there"


def _differences(where: str, has: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Of what is expected; inside a table that we write, also of what is not."""
    for key, value in expected.items():
        name, had = f"{where}{key}", has.get(key, ABSENT)
        if had is ABSENT:
            yield f"{CONFIG}: {name} is missing, it must be {json.dumps(value)}"
        elif isinstance(had, dict) and isinstance(value, dict) and key in TABLES:
            yield from _differences(f"{name}.", had, value)
        elif had != value or isinstance(had, bool) != isinstance(value, bool):
            yield f"{CONFIG}: {name} is {json.dumps(had)}, it must be {json.dumps(value)}"
    if where:
        yield from (
            f"{CONFIG}: {where}{key} = {json.dumps(has[key])} may not be there"
            for key in has
            if key not in expected and has[key] not in (None, False)
        )


TABLES = ("transformer_layer_config", "dflash_config", "eagle_config")


def refusals_of_all(drafter: DrafterConfig) -> Iterator[str]:
    """What no engine does."""
    layers = drafter.layers
    if not layers or sorted(set(layers)) != layers or layers[0] < 0:
        yield f"layers (A ids) are {layers}, they must ascend from 0 on"
    if drafter.hidden_size != drafter.target_hidden_size:
        yield (
            f"{CONFIG}: hidden_size is {drafter.hidden_size}, it must be target_hidden_size = "
            f"{drafter.target_hidden_size}: the embedding is the target's"
        )
    if drafter.algorithm == "dflash":
        yield from _dflash_refusals(drafter)
    elif drafter.num_layers != 1:
        yield f"{CONFIG}: num_hidden_layers is {drafter.num_layers}, it must be 1"


def _dflash_refusals(drafter: DrafterConfig) -> Iterator[str]:
    kinds, mask, vocab_size = fields.layer_types(drafter), drafter.mask_token_id, drafter.vocab_size
    if is_reduced(drafter):
        yield f"draft_vocab_size is {drafter.draft_vocab_size}: DFlash drafts with the head of its target, all of it"
    if not 0 <= mask < vocab_size:
        yield f"mask_token_id is {mask}, it must be a token of the target: 0 to {vocab_size - 1}"
    if drafter.block_size < 2:
        yield f"block_size is {drafter.block_size}, it must be at least 2"
    if len(kinds) != drafter.num_layers:
        yield f"layer_types has {len(kinds)} entries, there must be one for each of {drafter.num_layers} layers"
    for kind in sorted({*kinds} - {"full_attention", native.SLIDING}):
        yield f"layer_types has {kind}, known are full_attention and {native.SLIDING}"
    if native.SLIDING in kinds and not drafter.sliding_window:
        yield f"sliding_window is {drafter.sliding_window}, and a layer of sliding attention needs one"


def _tensor_problems(path: Path, expected: dict[str, Shape], dtype: str) -> Iterator[str]:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            yield from (f"{path.name}: {name} is missing" for name in expected if name not in names)
            yield from (f"{path.name}: {name} may not be there" for name in sorted(names - expected.keys()))
            for name, shape in expected.items():
                if name in names:
                    yield from _one_tensor(f"{path.name}: {name}", file.get_tensor(name), shape, dtype)
            if {"d2t", "t2d"} <= names & expected.keys():
                yield from _vocabulary(path.name, file.get_tensor("d2t"), file.get_tensor("t2d"))
    except (OSError, SafetensorError) as error:
        yield f"{path.name} cannot be read: {error}"


def _one_tensor(where: str, tensor: Tensor, shape: Shape, dtype: str) -> Iterator[str]:
    if tuple(tensor.shape) != shape.sizes:
        yield f"{where} has shape {tuple(tensor.shape)}, it must be {shape.sizes}"
    kind = str(tensor.dtype).removeprefix("torch.")
    if shape.dtype and kind != shape.dtype:
        yield f"{where} is {kind}, it must be {shape.dtype}"
    elif not shape.dtype and kind != dtype:
        yield f"{where} is {kind}, {CONFIG} says {dtype}"
    num_broken = int((~torch.isfinite(tensor)).sum())
    if num_broken:
        yield f"{where} has {num_broken} values that are not finite"


def _vocabulary(file: str, d2t: Tensor, t2d: Tensor) -> Iterator[str]:
    """d2t holds what is added to a draft id to have the target's: engines that take it for the id draft nonsense."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool or d2t.dim() != 1 or t2d.dim() != 1:
        return  # told of already
    ids = d2t + torch.arange(len(d2t))
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(t2d)):
        yield f"{file}: d2t leads outside the vocabulary of {len(t2d)}: its values are offsets, target id - draft id"
        return
    if not bool((ids.diff() > 0).all()):
        yield f"{file}: d2t does not ascend: its values are offsets, target id - draft id, of ids in order"
    marked = torch.zeros_like(t2d)
    marked[ids] = True
    if not torch.equal(marked, t2d):
        yield f"{file}: t2d marks other tokens than d2t leads to"
