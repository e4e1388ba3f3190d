"""Data sets to be previewed, the tiny target's tokenizer, and settings that lead to both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet import tokens
from draftfleet.settings import Settings, load

TINY_TARGET = Path(__file__).parents[3] / "examples/tiny-target"


@pytest.fixture(scope="session")
def tokenizer() -> tokens.TargetTokenizer:
    return tokens.load(TINY_TARGET)


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Settings]:
    """With a queue that nobody answers at: a dry run does not ask it."""

    def make(data: object, **changes: Any) -> Settings:
        flags = {
            "queue.url": "redis://127.0.0.1:1/0",
            "storage.url": str(tmp_path / "storage"),
            "target.model": "tiny",
            "target.path": str(TINY_TARGET),
            "sampling.max_tokens": 64,
            "producer.data": str(data),
        }
        return load(flags=flags | {name.replace("__", "."): value for name, value in changes.items()})

    return make
