"""What the tests of dialects share: what real servers said, a tokenizer, and a fake server to ask."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftfleet.testing import FakeServer
from draftfleet.tokens import TargetTokenizer, load

HERE = Path(__file__).parent
TINY_TARGET = HERE.parents[2] / "examples/tiny-target"


@pytest.fixture(scope="session")
def recorded() -> Callable[[str, str], dict[str, Any]]:
    """`recorded("vllm", "thinking")`: request, status, headers and body."""
    return lambda name, question: json.loads((HERE / name / f"{question}.json").read_text())


@pytest.fixture(scope="session")
def tokenizer() -> TargetTokenizer:
    return load(TINY_TARGET)


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer(model="tiny", tokenizer=str(TINY_TARGET)) as server:
        yield server
