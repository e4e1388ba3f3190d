"""The algorithm of the page, as it is written there, under the contract that every algorithm keeps."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from draftfleet.settings import load
from trainer import algorithms
from trainer.algorithms import Algorithm
from trainer.targets.hf import HfTarget

ROOT = Path(__file__).parents[2]
[BLOCK] = re.findall(
    r"^```python module\n(.*?)^```$", (ROOT / "docs/add-an-algorithm.md").read_text(), re.DOTALL | re.MULTILINE
)
CONTRACT = runpy.run_path(str(ROOT / "tests/contracts/algorithms/test_contract.py"))

globals().update({name: value for name, value in CONTRACT.items() if name.startswith("test_")})
target, captured = CONTRACT["target"], CONTRACT["captured"]


@pytest.fixture
def algorithm(target: HfTarget, monkeypatch: pytest.MonkeyPatch) -> Algorithm:
    """Built as `trainer.algorithms` would, were its line in the table."""
    module = ModuleType("medusa")
    exec(compile(BLOCK, "docs/add-an-algorithm.md", "exec"), vars(module))
    for name in ("medusa", "medusa.forced"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(algorithms.ALGORITHMS, "medusa", "medusa")
    settings = load(flags={"target.path": CONTRACT["TINY"]})
    torch.manual_seed(1)
    return algorithms.build(module.configure(settings, target), target)
