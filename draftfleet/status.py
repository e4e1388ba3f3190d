"""`draftfleet status`: the rows and batches of a run, its drafters and the workers, for a person or as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import redis
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from draftfleet import accounting, control, live
from draftfleet.accounting import Accountant
from draftfleet.drafters import names, read
from draftfleet.errors import QueueError
from draftfleet.queue import connect, queued
from draftfleet.reconcile import model_of
from draftfleet.repair import move_aside, publish_again
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage

NOT_BEGUN: dict[str, Any] = {
    "step": 0,
    "loss": None,
    "tokens": 0,
    "tokens_per_s": 0.0,
    "rows_admitted": 0,
    "finished": False,
}

ENDED = {
    "tool_calls": "at other tool calls than the source's",
    "truncated": "at an answer cut at its length",
    "failed": "at a turn that failed",
}

WATCH_S = 2.0
"""Seconds between two looks with --watch."""


def show(settings: Settings, *, watch: bool, as_json: bool, repair: bool) -> int:
    """Print the state of the run. Exit code 0; 1 if the accounting identity does not hold or shards are corrupt."""
    run = Run.open(open_storage(settings.storage), settings.run)
    if repair:
        _repair(settings, run)
    accountant = Accountant(run)
    if watch and not as_json:
        return _watch(settings, accountant)
    state = collect(settings, accountant)
    if as_json:
        print(json.dumps(state))
    else:
        Console().print(render(state))
    return 0 if state["identity_holds"] and not state["batches"]["corrupt"] else 1


def collect(settings: Settings, accountant: Accountant) -> dict[str, Any]:
    """The state as plain data. Redis being away is part of the state, not an error."""
    state = accounting.to_json(accountant.account())
    run = accountant.run
    state["drafters"] = drafters(run)
    state["control"] = control.read(run).model_dump()
    try:
        client = connect(settings)
        state["queue"] = {"waiting": queued(client, model_of(run)), "error": None}
        state["workers"] = [report.to_json() for report in live.read(client)]
    except (QueueError, redis.RedisError) as error:
        state["queue"] = {"waiting": None, "error": str(error)}
        state["workers"] = []
    return state


def drafters(run: Run) -> dict[str, Any]:
    """The live progress of each drafter of the run; step 0 for one that was asked for and has not begun."""
    found: dict[str, Any] = {}
    for name in names(run):
        if (pinned := read(run, name, "drafter-settings.json")) is not None:
            progress = read(run, name, "progress.json")
            found[name] = progress or NOT_BEGUN | {"max_steps": pinned["trainer"]["max_steps"]}
    return found


def _training_state(progress: dict[str, Any]) -> str:
    if progress["finished"]:
        return "finished"
    if not progress["step"]:
        return "asked for"
    return "waits for samples" if progress.get("waiting") else "training"


def render(state: dict[str, Any]) -> RenderableType:
    """Tables of the state: rows, workers, drafters, and what needs a person."""
    parts: list[RenderableType] = [_rows(state)]
    if state["workers"]:
        parts.append(_workers(state["workers"]))
    if state["drafters"]:
        parts.append(_drafters(state["drafters"]))
    parts += [Text(warning, style="yellow") for warning in warnings(state)]
    return Group(*parts)


def warnings(state: dict[str, Any]) -> list[str]:
    """What a person should know, each with what to do."""
    found: list[str] = []
    batches, ordered = state["batches"], state["control"]
    is_running = ordered["state"] == "running"
    if not is_running:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ordered["since"]))
        why = f": {ordered['reason']}" if ordered["reason"] else ""
        found.append(f"the run is {ordered['state']} since {since}{why}. `draftfleet resume {state['run']}` goes on.")
    if state["queue"]["error"]:
        found.append(state["queue"]["error"])
    if batches["corrupt"]:
        names = ", ".join(batches["corrupt"][:5])
        found.append(f"{len(batches['corrupt'])} shards cannot be read ({names}): run `draftfleet verify --repair`.")
    if batches["dead"]:
        found.append(f"{batches['dead']} rows were given up: see `draftfleet dead list`.")
    if state["mismatched"]:
        found.append(f"{state['mismatched']} rows have ids that do not match the server's count: kept, not trained on.")
    found += _ended(state["ended"])
    if state["expected"] is None:
        found.append("the producer has not finished: totals are not final.")
    if not state["identity_holds"]:
        found.append("the rows do not add up to what was produced: please report this with the run's folder listing.")
    for worker in state["workers"]:
        if worker["reason"]:
            found.append(f"worker {worker['process']} is {worker['state']}: {worker['reason']}")
        for server in worker["servers"]:
            if server["reason"]:
                found.append(f"server {server['url']} is {server['state']}: {server['reason']}")
    if state["pending"] and is_running and not state["workers"] and not state["queue"]["error"]:
        found.append("rows are pending and no worker is there: start `draftfleet work --servers URL,...`.")
    return found


def _ended(counts: dict[str, int]) -> list[str]:
    ended = ", ".join(f"{count} {ENDED[why]}" for why, count in counts.items() if count)
    return [f"conversations ended before their source: {ended}. Their finished turns are kept."] if ended else []


def _repair(settings: Settings, run: Run) -> None:
    moved = move_aside(run)
    for batch in moved:
        print(f"moved aside: shard {batch}", file=sys.stderr)
    published = publish_again(settings, run, moved)
    print(f"{len(moved)} shards moved aside, {published} batches published again", file=sys.stderr)


def _watch(settings: Settings, accountant: Accountant) -> int:
    with Live(console=Console(), auto_refresh=False, screen=False) as display:
        while True:
            state = collect(settings, accountant)
            display.update(render(state), refresh=True)
            trained = all(progress["finished"] for progress in state["drafters"].values())
            is_over = state["expected"] is not None and not state["pending"]
            if trained and (is_over or state["control"]["state"] == "cancelled"):
                return 0
            time.sleep(WATCH_S)


def _rows(state: dict[str, Any]) -> Table:
    ordered = state["control"]
    said = [ordered["state"]] if ordered["state"] != "running" else []
    said += [f"{ordered['priority']} priority"] if ordered["priority"] != "normal" else []
    said += [f"budget {ordered['token_budget']:,} tokens"] if ordered["token_budget"] else []
    title = f"run {state['run']}" + (f" ({', '.join(said)})" if said else "")
    table = Table(title=title, title_justify="left")
    has_more_turns = state["turns"] != state["ok"] + state["truncated"]
    columns = ("ok", "truncated", "failed", "pending", *(["turns"] if has_more_turns else []), "tokens")
    for name in ("expected", *columns, "batches done", "queue"):
        table.add_column(name, justify="right")
    batches = state["batches"]
    expected = "…" if state["expected"] is None else f"{state['expected']:,}"
    waiting = state["queue"]["waiting"]
    table.add_row(
        expected,
        *(f"{state[name]:,}" for name in columns),
        f"{batches['done']}/{batches['batches']}",
        "away" if waiting is None else str(waiting),
    )
    return table


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(title="workers", title_justify="left")
    for name in ("worker", "state", "server", "server state", "in flight", "limit", "because", "KV", "rows", "tok/s"):
        is_text = name.startswith("s") or name in {"worker", "because"}
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for worker in workers:
        for server in worker["servers"]:
            table.add_row(
                worker["process"],
                worker["state"],
                server["url"],
                server["state"],
                str(server["in_flight"]),
                str(server["limit"]),
                server["because"],
                _share((server["gauges"] or {}).get("kv")),
                f"{server['rows']:,}",
                f"{server['tokens_per_s']:,.0f}",
            )
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _drafters(drafters: dict[str, Any]) -> Table:
    table = Table(title="drafters", title_justify="left")
    for name in ("drafter", "state", "step", "loss", "tokens", "tok/s", "rows"):
        table.add_column(name, justify="left" if name in {"drafter", "state"} else "right")
    for name, progress in drafters.items():
        table.add_row(
            name,
            _training_state(progress),
            f"{progress['step']}/{progress['max_steps']}",
            f"{progress['loss']:.3f}" if progress["loss"] is not None else "",
            f"{progress['tokens']:,}",
            f"{progress['tokens_per_s']:,.0f}",
            f"{progress['rows_admitted']:,}",
        )
    return table
