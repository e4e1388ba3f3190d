"""The target of the page, as it is written there, under the contract that every target keeps."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from draftfleet.settings import load
from trainer.targets import Row

ROOT = Path(__file__).parents[2]
[BLOCK] = re.findall(
    r"^```python module\n(.*?)^```$", (ROOT / "docs/add-a-target.md").read_text(), re.DOTALL | re.MULTILINE
)
CONTRACT = runpy.run_path(str(ROOT / "tests/trainer/targets/test_contract.py"))
AROUND = runpy.run_path(str(ROOT / "tests/trainer/targets/conftest.py"))

globals().update({name: test for name, test in CONTRACT.items() if name.startswith("test_")})
batches, expected = CONTRACT["batches"], CONTRACT["expected"]
rows, reference = AROUND["rows"], AROUND["reference"]


@pytest.fixture
def target() -> Any:
    module = ModuleType("memory")
    exec(compile(BLOCK, "docs/add-a-target.md", "exec"), vars(module))
    settings = load(flags={"target.path": AROUND["TINY"], "storage.min_free_gb": 0})
    return module.load(settings, CONTRACT["LAYERS"], torch.device("cpu"))


def test_what_was_captured_once_is_not_captured_again(target: Any, batches: list[list[Row]]) -> None:
    first = list(target.capture(batches))
    target._source = None

    again = list(target.capture(batches))

    assert all(
        one.hidden is other.hidden
        for batch, then in zip(first, again, strict=True)
        for one, other in zip(batch, then, strict=True)
    )
