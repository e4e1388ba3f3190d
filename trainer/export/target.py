"""What a target's folder says that an export depends on: its type, its architecture, its licence, its embedding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftfleet.errors import TargetError


@dataclass(frozen=True, slots=True)
class TargetFacts:
    dtype: str
    architectures: list[str] = field(default_factory=list[str])


def facts(path: str) -> TargetFacts:
    """Raises TargetError if the target cannot be asked."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes a second, and a dry look does without

    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise TargetError(
            f"the target {path} could not be asked for its dtype: there is no such folder. "
            "Set target.path to its folder, or export.dtype to bfloat16, float16 or float32."
        )
    try:
        config: Any = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise TargetError(
            f"the target {path or '(unset)'} could not be asked for its dtype: {error} "
            "Set target.path to its folder, or export.dtype to bfloat16, float16 or float32."
        ) from None
    dtype = config.get_text_config().dtype or torch.float32
    return TargetFacts(str(dtype).removeprefix("torch."), list(config.architectures or []))


def licence(path: str) -> str | None:
    """As the front matter of the target's model card says, where its folder has one."""
    card = Path(path) / "README.md"
    if not path or not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:\s*(\S+)\s*$", front[1], re.MULTILINE) if front else None
    return found[1].strip("\"'") if found else None


NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
"""How the name of an input embedding ends."""


def embedding(path: str, vocab_size: int, width: int) -> Tensor:
    """Read alone, without the rest of the weights. Raises TargetError."""
    try:
        for file, names in _files(path):
            with safe_open(file, framework="pt") as opened:
                for name in names or opened.keys():
                    if name.endswith(NAMES) and tuple(opened.get_slice(name).get_shape()) == (vocab_size, width):
                        return opened.get_tensor(name)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TargetError(f"the embedding of the target {path or '(unset)'} cannot be read: {error}") from None
    raise TargetError(
        f"the target {path or '(unset)'} has no embedding of {vocab_size} tokens and width {width} in its safetensors: "
        "set target.path to the target that the drafter was trained for."
    )


def _files(path: str) -> Iterator[tuple[str, list[str]]]:
    """The files that may hold it, each with the names of its embeddings where an index tells them."""
    from transformers.utils.hub import cached_file  # noqa: PLC0415

    index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        yield str(cached_file(path, "model.safetensors")), []
        return
    files = json.loads(Path(index).read_text())["weight_map"]
    for name, file in files.items():
        if name.endswith(NAMES):
            yield str(cached_file(path, file)), [name]
