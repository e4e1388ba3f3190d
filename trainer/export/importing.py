"""Folders of other makers, and our own, as drafters to train on or to judge.

    drafter.json                               ours: a checkpoint
    config.json with speculators_model_type    speculators, also as vLLM reads it
    config.json with DFlashDraftModel          z-lab's DFlash, of vLLM and SGLang
    config.json with eagle_config              SGLang and SpecForge: EAGLE-3's ids as A ids
    config.json with the ids at its top        vLLM: EAGLE-3's ids as B ids

What an engine would make of a folder is what is read, to the letter: its defaults where a field is missing, except for
layer ids, which are asked for. Weights become float32, as training holds them; the embedding stays out, as everywhere.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftfleet.errors import DrafterError
from draftfleet.logs import event
from trainer import drafter as drafters
from trainer.drafter import DrafterConfig
from trainer.export import fields
from trainer.export.check import refusals_of_all
from trainer.export.folder import CONFIG, TENSORS, Manifest, Verifier
from trainer.export.formats import format_named
from trainer.export.shapes import EMBEDDING, is_reduced, shapes

log = logging.getLogger(__name__)

OLD_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
"""Of EAGLE-3's tensors elsewhere."""

OF_THE_TARGET = ("verifier_lm_head.", "verifier_norm.")
"""Copies of what the target has. Its own is used."""


@dataclass(frozen=True, slots=True)
class Imported:
    config: DrafterConfig
    tensors: dict[str, Tensor]
    """Named as in training. Without `lm_head.weight` where the folder leaves it to the target's."""
    embedding: Tensor | None = None
    """The folder's copy of the target's, where it has one."""


def load(folder: Path, num_target_layers: int = 0) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """The drafter of a folder, its tensors named as in training. Raises DrafterError.

    `num_target_layers`, where it is known, stands in for what most formats do not say, and for EAGLE-3's layer ids
    where a folder has none: [2, L/2, L-3] entering, which is what every engine would take.
    """
    imported = read(folder, num_target_layers)
    return imported.config, imported.tensors


def read(folder: Path, num_target_layers: int = 0) -> Imported:
    """As `load`, with the embedding that the folder may have: it tells whether it was made for this target."""
    if (folder / "drafter.json").exists():
        return Imported(*drafters.load(folder))
    try:
        config = json.loads((folder / CONFIG).read_text())
        stored = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise DrafterError(
            f"{folder} is no drafter: it has neither drafter.json nor a {CONFIG} with its {TENSORS} ({error})."
        ) from None
    manifest = Manifest.find(folder)
    try:
        found, embedding = _named(config, stored)
        drafter = _read(_told_by(found, config), manifest, num_target_layers)
        _complete(drafter, found)
    except KeyError as error:
        raise DrafterError(f"{folder}/{CONFIG}: {error.args[0]} is missing.{_hint(error)}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise DrafterError(f"{folder} cannot be read as a drafter: {error}.") from None
    said = manifest.trained if manifest else {}
    # Of another version, it may know fields that this one does not.
    known = {one.name: said[one.name] for one in dataclasses.fields(DrafterConfig) if one.name in said}
    drafter = dataclasses.replace(drafter, **known)
    if not drafter.num_target_layers:
        drafter = dataclasses.replace(drafter, num_target_layers=num_target_layers)
    log.info(event("drafter read", folder=folder, algorithm=drafter.algorithm, layers=drafter.layers))
    return Imported(drafter, found, embedding)


def format_of(config: Mapping[str, Any]) -> str:
    """In whose words a config.json is written."""
    if "speculators_model_type" in config:
        return "speculators"
    if config.get("eagle_config") and not config.get("eagle_aux_hidden_state_layer_ids"):
        return "sglang"
    return "vllm"


def _read(config: Mapping[str, Any], manifest: Manifest | None, num_target_layers: int) -> DrafterConfig:
    for name in fields.FOREIGN:
        value = config.get(name)
        if value and not (isinstance(value, float) and value == 1.0):
            raise ValueError(f"{CONFIG}: {name} = {value!r}, which no drafter of draftfleet has")
    target = Verifier(manifest.target, manifest.target_architectures) if manifest else Verifier("")
    name = format_of(config)
    if _has_two_lists(config):
        raise ValueError(f"{CONFIG}: eagle_config and eagle_aux_hidden_state_layer_ids name other layers")
    if num_target_layers and name != "speculators" and not _has_ids(config):
        first = [1, num_target_layers // 2 - 1, num_target_layers - 4]
        log.warning(event("layer ids taken for the engines' default", layers=first))
        config = {**config, "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in first]}
        name = "vllm"
    drafter = format_named(name).read(config, target)
    if problems := list(refusals_of_all(drafter)):
        raise ValueError("; ".join(problems))
    return drafter


def _has_ids(config: Mapping[str, Any]) -> bool:
    nested = config.get("eagle_config") or {}
    return bool(
        _is_dflash(config)
        or config.get("eagle_aux_hidden_state_layer_ids")
        or nested.get("eagle_aux_hidden_state_layer_ids")
    )


def _has_two_lists(config: Mapping[str, Any]) -> bool:
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    top = config.get("eagle_aux_hidden_state_layer_ids") or []
    return bool(nested and top) and [layer + 1 for layer in nested] != list(top)


def _hint(error: KeyError) -> str:
    if "layer_ids" in str(error.args[0]) or error.args[0] == "eagle_config":
        return " Without layer ids an engine guesses them: write down those that the drafter was trained with."
    return ""


def _is_dflash(config: Mapping[str, Any]) -> bool:
    return (
        config.get("speculators_model_type") == "dflash"
        or "dflash_config" in config
        or "DFlashDraftModel" in (config.get("architectures") or [])
    )


def _named(config: Mapping[str, Any], stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The tensors under the names of training, and the embedding. Copies of what the target has are left out."""
    found: dict[str, Tensor] = {}
    embedding = None
    for name, tensor in stored.items():
        plain = name.removeprefix("model.")
        typed = tensor.float() if tensor.is_floating_point() else tensor
        if plain == EMBEDDING:
            embedding = typed
        elif plain.startswith(OF_THE_TARGET) or plain.endswith("rotary_emb.inv_freq"):
            continue
        elif _is_dflash(config):
            if plain != "lm_head.weight":  # with the whole vocabulary, the target's
                found[plain] = typed
        else:
            for old, new in OLD_NAMES.items():
                plain = plain.replace(old, new)
            found[plain] = typed
    return found, embedding


def _told_by(found: Mapping[str, Tensor], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration, with the norms of EAGLE-3 that it is silent of and that are there."""
    if _is_dflash(config) or not isinstance(config, dict):
        return config
    told: dict[str, Any] = {}
    for flag, tensor in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        if config.get(flag) is None and tensor in found:
            told[flag] = True
    if "speculators_model_type" not in config and "midlayer.self_attn.q_norm.weight" in found:
        told["model_type"] = "qwen3"
    return {**config, **told}


def _complete(drafter: DrafterConfig, found: dict[str, Tensor]) -> None:
    """Make what follows from the rest, and refuse what is not whole. Raises ValueError."""
    _complete_vocabulary(drafter, found)
    expected = shapes(drafter)
    may_be_missing = set() if is_reduced(drafter) else {"lm_head.weight"}
    problems = [
        *(f"{name} is missing" for name in expected if name not in found and name not in may_be_missing),
        *(f"{name} is not known" for name in found if name not in expected),
        *(
            f"{name} has shape {tuple(found[name].shape)}, it must be {shape.sizes}"
            for name, shape in expected.items()
            if name in found and tuple(found[name].shape) != shape.sizes
        ),
        *(
            f"{name} has values that are not finite"
            for name, one in found.items()
            if not bool(torch.isfinite(one).all())
        ),
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _complete_vocabulary(drafter: DrafterConfig, found: dict[str, Tensor]) -> None:
    """Both mappings of a reduced vocabulary, made of either; none of a whole one, where some makers store them."""
    if not is_reduced(drafter):
        found.pop("d2t", None)
        found.pop("t2d", None)
        return
    if "d2t" in found:
        found["d2t"] = found["d2t"].to(torch.int64)
        ids = found["d2t"] + torch.arange(len(found["d2t"]))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < drafter.vocab_size:
            raise ValueError(f"d2t leads outside the vocabulary of {drafter.vocab_size}")
        marked = torch.zeros(drafter.vocab_size, dtype=torch.bool)
        marked[ids] = True
        found["t2d"] = marked
    elif "t2d" in found:
        ids = found["t2d"].nonzero()[:, 0]
        found["d2t"] = ids - torch.arange(len(ids))
