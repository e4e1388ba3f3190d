"""The storage of the page, as it is written there, under the contract that every storage keeps."""

from __future__ import annotations

import inspect
import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftfleet.storage import Storage

ROOT = Path(__file__).parents[2]
[BLOCK] = re.findall(
    r"^```python module\n(.*?)^```$", (ROOT / "docs/add-a-storage.md").read_text(), re.DOTALL | re.MULTILINE
)
CONTRACT = runpy.run_path(str(ROOT / "tests/contracts/test_storage.py"))

OPENED_BY_URL = {name for name in CONTRACT if "_racing_processes_" in name or "_of_processes_" in name}
"""Of processes that open it by its URL, which wants its line in `open_storage`; threads race below in their place."""


def is_of_the_contract(name: str, value: Any) -> bool:
    return name.startswith("test_") and [*inspect.signature(value).parameters] == ["any_storage"]


globals().update(
    {name: test for name, test in CONTRACT.items() if name not in OPENED_BY_URL and is_of_the_contract(name, test)}
)


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    module = ModuleType("sqlite")
    exec(compile(BLOCK, "docs/add-a-storage.md", "exec"), vars(module))
    return lambda: module.SqliteStorage(tmp_path / "runs.db")


@pytest.fixture
def any_storage(opened: Any) -> Storage:
    return opened()


def test_the_contract_is_there() -> None:
    assert len(OPENED_BY_URL) == 2
    assert len([name for name in globals() if name in CONTRACT and name.startswith("test_")]) >= 10


def test_of_racing_writers_exactly_one_wins_each_path(opened: Any) -> None:
    def race(number: int) -> list[tuple[int, int]]:
        storage = opened()
        return [(path, number) for path in range(50) if storage.put_if_absent(f"race/{path}", b"%d" % number)]

    with ThreadPoolExecutor(3) as pool:
        won = [pair for pairs in pool.map(race, range(3)) for pair in pairs]

    assert sorted(path for path, _ in won) == list(range(50))
    assert all(opened().read(f"race/{path}") == b"%d" % number for path, number in won)
