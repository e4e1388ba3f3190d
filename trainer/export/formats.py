"""How each engine is told what a drafter is: the protocol, and the table from name to module."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from draftfleet.errors import SettingsError
from trainer.drafter import DrafterConfig
from trainer.export.folder import CONFIG, Verifier

FORMATS = {
    "vllm": "trainer.export.vllm",
    "sglang": "trainer.export.sglang",
    "speculators": "trainer.export.speculators",
}


class Format(Protocol):
    """How a folder is written for one engine. Layer ids are A ids here (trainer.targets); the format converts."""

    FOREIGN: tuple[str, ...]
    """Fields that may not be there: other places for what is told, or what the engine would act on."""

    WITH_EMBEDDING: tuple[str, ...]
    """Algorithms whose folders hold a copy of the target's embedding."""

    def config(self, drafter: DrafterConfig, dtype: str, target: Verifier) -> dict[str, Any]:
        """config.json."""
        ...

    def read(self, config: Mapping[str, Any], target: Verifier) -> DrafterConfig:
        """The drafter that a config.json describes. It need not say how deep the target is (0).

        Raises KeyError naming what is missing and the engine would guess, ValueError for what no drafter of ours is.
        """
        ...

    def tensor_name(self, name: str) -> str:
        """The format's name of a tensor."""
        ...

    def refusals(self, drafter: DrafterConfig, target: Verifier) -> Iterator[str]:
        """Why the engine would serve such a drafter otherwise than it was trained."""
        ...

    def serve_command(self, folder: Path, drafter: DrafterConfig, target: str, k: int) -> list[str]: ...


def format_named(name: str) -> Format:
    """Raises SettingsError for a format that is not known."""
    if name not in FORMATS:
        raise SettingsError(f"format {name}: unknown; known are {', '.join(FORMATS)}.")
    return cast(Format, import_module(FORMATS[name]))


def serve_command(format_name: str, folder: Path, target: str, k: int) -> list[str]:
    """The command line that serves `target` with the drafter in `folder`, at most `k` tokens drafted per step.

    A DFlash drafter drafts what is left of a block beside its anchor: fewer may be asked for, never more.
    """
    format = format_named(format_name)
    drafter = format.read(json.loads((folder / CONFIG).read_text()), Verifier(target))
    return format.serve_command(folder, drafter, target, min(k, drafter.block_size - 1) if drafter.block_size else k)
