"""What a trainer of the race is told at its start: one training, with which recipe, for how long."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Order:
    algorithm: str
    target: str
    rows: str
    """The folder of the rows."""
    seed: int
    steps: int
    """Optimizer steps; the schedule ends there."""
    layers: list[int] = field(default_factory=lambda: [1, 3, 4])
    """Outputs of these, counted from 0."""
    batch_tokens: int = 512
    ttt_steps: int = 3
    block_size: int = 8
    num_layers: int = 2
    anchors: int = 64
    """Of a step."""
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> str:
        return json.dumps(asdict(self))
