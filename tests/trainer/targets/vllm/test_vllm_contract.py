"""The target behind a server keeps the contract of all targets: the tests of `test_contract.py`, run on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import targets
from trainer.targets import Target

_spec = importlib.util.spec_from_file_location("contract", Path(__file__).parents[1] / "test_contract.py")
assert _spec is not None
assert _spec.loader is not None
contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(contract)
globals().update({name: value for name, value in vars(contract).items() if name.startswith("test_")})

batches, expected = contract.batches, contract.expected


@pytest.fixture
def target(start_engine: Callable[..., Any], settings: Callable[..., Any]) -> Target:
    engine = start_engine(layers=[3, 4, 7, 8])
    return targets.load(settings(engine), contract.LAYERS, torch.device("cpu"))
