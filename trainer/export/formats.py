"""How each engine is told what a drafter is: the protocol, and the table from name to module."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from draftfleet.errors import SettingsError

FORMATS = {"vllm": "trainer.export.vllm", "sglang": "trainer.export.sglang"}


class Format(Protocol):
    """How one engine is told the layers. Layer ids are A ids here (trainer.targets); the format converts."""

    FOREIGN: tuple[str, ...]

    def write_layers(self, layers: list[int]) -> dict[str, Any]:
        """The fields of config.json that name the layers."""
        ...

    def read_layers(self, config: dict[str, Any]) -> list[int]:
        """Raises KeyError where the engine would not find them."""
        ...

    def last_layer(self, num_target_layers: int) -> int: ...

    def serve_command(self, folder: Path, target: str, k: int) -> str: ...


def format_named(name: str) -> Format:
    """Raises SettingsError for a format that is not known."""
    if name not in FORMATS:
        raise SettingsError(f"format {name}: unknown; known are {', '.join(FORMATS)}.")
    return cast(Format, import_module(FORMATS[name]))


def serve_command(format_name: str, folder: Path, target: str, k: int) -> str:
    """The command line that serves `target` with the drafter in `folder`, `k` tokens drafted per step."""
    return format_named(format_name).serve_command(folder, target, k)
