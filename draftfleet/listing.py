"""`draftfleet runs list`: every run in the storage with its state, its rows and its drafters."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from draftfleet import control
from draftfleet.accounting import Accountant
from draftfleet.control import DELETED
from draftfleet.errors import CorruptFile, RunMissing, RunNewer
from draftfleet.reconcile import model_of
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import drafters
from draftfleet.storage import open_storage
from draftfleet.tables import Fitted

COUNTS = ("ok", "truncated", "failed", "pending", "tokens")


def show(settings: Settings, *, as_json: bool) -> int:
    """Print them, the oldest first. Returns exit code 0."""
    storage = open_storage(settings.storage)
    runs: list[Run] = []
    for name in storage.folders():
        try:
            runs.append(Run.open(storage, name, even_deleted=True))
        except (RunMissing, RunNewer, CorruptFile):  # somebody's folder beside ours
            continue
    found = [describe(run) for run in sorted(runs, key=lambda run: run.info.created_at)]
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        Console().print(Fitted(table(found)), *reasons(found), sep="\n")
    return 0


def describe(run: Run) -> dict[str, Any]:
    controlled = control.read(run)
    said: dict[str, Any] = {
        "run": run.name,
        "run_id": run.run_id,
        "model": model_of(run),
        "state": controlled.state,
        "reason": controlled.reason,
        "since": controlled.since,
        "priority": controlled.priority,
        "token_budget": controlled.token_budget,
        "age_s": max(0.0, time.time() - run.info.created_at),
        "error": None,
        "drafters": {},
        **dict.fromkeys(COUNTS),
    }
    if controlled == DELETED:
        return said | {"state": "being deleted", "reason": f"`draftfleet runs delete {run.name}` goes on with it"}
    try:
        account = Accountant(run).account()
    except CorruptFile as error:
        return said | {"error": str(error)}
    if controlled.is_running:
        said["state"] = (
            "complete" if account.is_complete else "running" if account.expected is not None else "producing"
        )
    progress = {name: "finished" if one["finished"] else one["step"] for name, one in drafters(run).items()}
    return said | {name: getattr(account, name) for name in COUNTS} | {"drafters": progress}


def table(found: list[dict[str, Any]]) -> Table:
    shown = Table(title="runs", title_justify="left")
    for name in ("run", "state", "priority", *COUNTS, "age", "model", "drafters"):
        is_number = name in COUNTS or name == "age"
        shown.add_column(name, justify="right" if is_number else "left", no_wrap=name in ("run", "state"))
    for one in found:
        shown.add_row(
            one["run"],
            one["state"],
            one["priority"],
            *("?" if one[name] is None else f"{one[name]:,}" for name in COUNTS),
            age(one["age_s"]),
            one["model"],
            ", ".join(f"{name} {at if at == 'finished' else f'step {at:,}'}" for name, at in one["drafters"].items()),
        )
    return shown


def reasons(found: list[dict[str, Any]]) -> list[str]:
    """Why runs are in the state in which they are, and what kept them from being counted."""
    lines = [f"{one['run']} is {one['state']}: {one['reason']}" for one in found if one["reason"]]
    return lines + [f"{one['run']}: {one['error']}" for one in found if one["error"]]


def age(seconds: float) -> str:
    """In the largest unit of which there are two: `45 s`, `90 min`, `30 h`, `12 d`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
