"""Data files in the shapes that the producer reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from draftfleet.settings import Producer


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Iterable[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def knobs() -> Callable[..., Producer]:
    def make(data: object = "", **values: Any) -> Producer:
        return Producer(data=str(data), **values)

    return make
