"""What a target's folder says that an export depends on: its type, its architecture, its licence."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftfleet.errors import TargetError


@dataclass(frozen=True, slots=True)
class TargetFacts:
    dtype: str
    architectures: list[str] = field(default_factory=list[str])


def facts(path: str) -> TargetFacts:
    """Raises TargetError if the target cannot be asked."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes a second, and a dry look does without

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
