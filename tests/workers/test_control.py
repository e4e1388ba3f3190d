"""Which runs a process looks at for orders, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftfleet import control
from draftfleet.queue import connect
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from workers.control import Orders


@pytest.fixture
def held() -> list[Any]:
    """The batches in hand."""
    return []


@pytest.fixture
def orders(settings: Settings, held: list[Any]) -> Orders:
    return Orders(
        connect(settings),
        "process",
        SimpleNamespace(all=lambda: held),  # type: ignore[arg-type]
        let_go=lambda batches, patience_s: None,
        drain=lambda: None,
        on_change=lambda: None,
        patience_s=0,
    )


def test_only_runs_that_batches_are_held_of_are_looked_at_all_the_time(
    orders: Orders, held: list[Any], storage: FileStorage, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [Run.create(storage, f"other-{number}", {}, {}) for number in range(3)]
    for one in (run, *others):
        orders.open(one)
    held.append(SimpleNamespace(run=run, token="t", stopped=None, is_complete=True))
    looked: list[str] = []
    read = control.read
    monkeypatch.setattr(control, "read", lambda run: (looked.append(run.name), read(run))[1])

    orders.look()

    assert looked == [run.name]


def test_a_run_of_which_nothing_was_held_is_looked_at_when_a_message_comes(
    orders: Orders, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.open(run)
    control.change(run, None, state="paused")
    orders.look()
    just_opened = orders.of(run).state

    monkeypatch.setattr("workers.control.LOOK_S", 0.0)
    later = orders.of(run).state

    assert (just_opened, later) == ("running", "paused")
