"""The state printed once, or drawn again and again until the run is done."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from draftfleet.accounting import Accountant
from draftfleet.errors import CorruptFile, StorageError
from draftfleet.repair import move_aside, publish_again
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import panels
from draftfleet.status.collecting import Seen, collect
from draftfleet.storage import open_storage

WATCH_S = 2.0
"""Seconds between two looks with --watch."""

LINE_S = 60.0
"""The same between two lines where no terminal is watched."""


def show(settings: Settings, *, watch: bool, as_json: bool, repair: bool) -> int:
    """Print the state of the run. Exit code 0; 1 if the accounting identity does not hold or shards are corrupt."""
    run = Run.open(open_storage(settings.storage), settings.run)
    if repair:
        _repair(settings, run)
    accountant, console = Accountant(run), Console()
    state: dict[str, Any] = {}
    if not watch:
        state = collect(settings, accountant)
        if as_json:
            print(json.dumps(state))
        else:
            console.print(panels.render(state))
    elif as_json:
        for state in _looks(settings, accountant, WATCH_S):
            print(json.dumps(state), flush=True)
    elif console.is_terminal:
        state = _watched(settings, accountant, console)
        console.print(panels.render(state))
    else:
        for state in _looks(settings, accountant, LINE_S):
            print(f"{time.strftime('%H:%M:%S')} {panels.line(state)}", flush=True)
    return 0 if state["identity_holds"] and not state["batches"]["corrupt"] else 1


class Window:
    """The state in a window that is too low for all of it: the middle is left out, never what is to be done."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(height=None)
        lines = console.render_lines(panels.body(self._state), free, pad=False)
        tail = console.render_lines(panels.last(self._state), free, pad=False)
        room = max((options.height or console.height) - len(tail), 1)
        for number, line in enumerate(lines[:room]):
            if number == room - 1 and len(lines) > room:
                yield Text(f"… {len(lines) - room + 1} lines more: make the window higher", style="dim", no_wrap=True)
            else:
                yield from line
                yield Text("")
        for line in tail:
            yield from line
            yield Text("")


def _watched(settings: Settings, accountant: Accountant, console: Console) -> dict[str, Any]:
    """Returns the last state. On a screen of its own, so that each look is drawn over the one before."""
    state: dict[str, Any] = {}
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as display:
        for state in _looks(settings, accountant, WATCH_S):
            display.update(Window(state), refresh=True)
    return state


def _looks(settings: Settings, accountant: Accountant, pause_s: float) -> Iterator[dict[str, Any]]:
    """A state for each look, until there is nothing more to come. A storage that is away for a while ends nothing."""
    seen = Seen()
    state: dict[str, Any] | None = None
    while True:
        try:
            state = collect(settings, accountant, seen)
        except CorruptFile:
            raise
        except StorageError as error:
            if state is None:
                raise
            print(f"draftfleet: {error} Looking again.", file=sys.stderr)
        else:
            yield state
            if is_over(state):
                return
        time.sleep(pause_s)


def is_over(state: dict[str, Any]) -> bool:
    """Whether every row has an outcome, or the run was cancelled, and every drafter that was asked for is made."""
    trained = all(progress["state"] in ("finished", "failed") for progress in state["drafters"].values())
    is_answered = state["expected"] is not None and not state["pending"]
    return trained and (is_answered or state["control"]["state"] == "cancelled")


def _repair(settings: Settings, run: Run) -> None:
    moved = move_aside(run)
    for batch in moved:
        print(f"moved aside: shard {batch}", file=sys.stderr)
    published = publish_again(settings, run, moved)
    print(f"{len(moved)} shards moved aside, {published} batches published again", file=sys.stderr)
