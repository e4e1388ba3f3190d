"""What `draftfleet bench --with URL` is told to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`file` None: the run's held-out prompts. `max_tokens` None: evaluation.max_tokens. `limit`: prompts of a window,
    more where many are asked at once."""

    with_url: str
    without_url: str | None = None
    concurrency: Sequence[int] = (1, 8, 32)
    file: str | None = None
    limit: int = 32
    max_tokens: int | None = None
    repeat: int = 3
    temperature: float = 0.0
