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

from draftfleet import accounting, control, drawing, eta, live, trainings
from draftfleet.accounting import Accountant
from draftfleet.drafters import names, read
from draftfleet.errors import QueueError
from draftfleet.queue import connect, queued
from draftfleet.reconcile import model_of
from draftfleet.repair import move_aside, publish_again
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from draftfleet.tables import Fitted

NOT_BEGUN: dict[str, Any] = {
    "step": 0,
    "loss": None,
    "tokens": 0,
    "tokens_per_s": 0.0,
    "rows_admitted": 0,
    "finished": False,
    "acceptance_length": None,
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
    account = accountant.account()
    state = accounting.to_json(account)
    run = accountant.run
    state["drafters"] = drafters(run)
    state["control"] = control.read(run).model_dump()
    state["drawn"] = _drawn(run)
    try:
        client = connect(settings)
        state["queue"] = {"waiting": queued(client, model_of(run)), "error": None}
        reports = live.read(client)
        state["workers"] = [report.to_json() for report in reports]
        state["eta"] = eta.of_run(accountant, account, reports).to_json()
        for name, (standing, trainer) in trainings.standing(client, run, settings.claims, state["drafters"]).items():
            state["drafters"][name] |= {"state": standing, "trainer": trainer}
    except (QueueError, redis.RedisError) as error:
        state["queue"] = {"waiting": None, "error": str(error)}
        state["workers"] = []
        state["eta"] = eta.Estimate(why="Redis is away").to_json()
    return state


def _drawn(run: Run) -> list[dict[str, Any]]:
    """How many rows are asked in which way, where there is a choice: the producer's count. Before it has finished the
    shares that are to be expected."""
    if drawn := (run.sealed() or {}).get("drawn"):
        total = sum(way["rows"] for way in drawn)
        return [way | {"share": way["rows"] / max(total, 1)} for way in drawn]
    ways = drawing.ways(drawing.asked(run))
    return [way.drawn | {"rows": None, "share": way.share} for way in ways if way.drawn]


def drafters(run: Run) -> dict[str, Any]:
    """The live progress of each drafter of the run; step 0 for one that was asked for and has not begun.

    `best` is what best.json says, None before a checkpoint was measured; `state` what the progress alone tells.
    """
    found: dict[str, Any] = {}
    for name in names(run):
        if (pinned := read(run, name, "drafter-settings.json")) is not None:
            progress = read(run, name, "progress.json") or {"max_steps": pinned["trainer"]["max_steps"]}
            found[name] = NOT_BEGUN | progress
            found[name] |= {
                "algorithm": pinned["trainer"].get("algorithm", "eagle3"),  # an older version had no other
                "best": read(run, name, "best.json"),
                "state": trainings.by_progress(found[name]),
                "trainer": None,
            }
    return found


def render(state: dict[str, Any]) -> RenderableType:
    """Tables of the state: rows, workers, drafters, and what needs a person."""
    parts: list[RenderableType] = [Fitted(_rows(state)), *map(Text, _asked(state["drawn"]))]
    if state["workers"]:
        parts.append(Fitted(_workers(state["workers"])))
    if state["drafters"]:
        parts.append(Fitted(_drafters(state["drafters"])))
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
    found += _not_continued(state["not_continued"]) + _ended(state["ended"])
    if state["expected"] is None:
        found.append("the producer has not finished: totals are not final.")
    if not state["identity_holds"]:
        found.append("the rows do not add up to what was produced: please report this with the run's folder listing.")
    found += _not_trained(state["drafters"])
    for worker in state["workers"]:
        if worker["reason"]:
            found.append(f"worker {worker['process']} is {worker['state']}: {worker['reason']}")
        for server in worker["servers"]:
            if server["reason"]:
                found.append(f"server {server['url']} is {server['state']}: {server['reason']}")
    if state["pending"] and is_running and not state["workers"] and not state["queue"]["error"]:
        found.append("rows are pending and no worker is there: start `draftfleet work --servers URL,...`.")
    return found


def _asked(drawn: list[dict[str, Any]]) -> list[str]:
    """`asked with thinking on 50.2 % (502 rows), thinking off 49.8 % (498 rows)`"""
    ways: list[str] = []
    for way in drawn:
        knobs = [f"{name} {_knob(value)}" for name, value in way.items() if name not in ("rows", "share")]
        rows = "" if way["rows"] is None else f" ({way['rows']:,} rows)"
        ways.append(f"{' and '.join(knobs)} {way['share']:.1%}{rows}")
    return [f"asked with {', '.join(ways)}"] if ways else []


def _knob(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _not_continued(count: int) -> list[str]:
    do = "`draftfleet continue --max-tokens N --dry-run` says why"
    return [f"{count} cut answers could not go on and stand as they are: {do}."] if count else []


def _ended(counts: dict[str, int]) -> list[str]:
    ended = ", ".join(f"{count} {ENDED[why]}" for why, count in counts.items() if count)
    return [f"conversations ended before their source: {ended}. Their finished turns are kept."] if ended else []


def _not_trained(drafters: dict[str, Any]) -> list[str]:
    found = [
        f"drafter {name} failed at step {one['step']:,}: {_words(one.get('error'))} "
        f"`draftfleet train --drafter {name}` goes on from its latest checkpoint."
        for name, one in drafters.items()
        if one["state"] == "failed"
    ]
    if queued := [name for name, one in drafters.items() if one["state"] == "queued"]:
        found.append(
            f"queued for training: {', '.join(queued)}. A trainer takes one at a time: start another `draftfleet "
            "trainer`, on another node or with another trainer.device, if none is free."
        )
    return found


def _words(error: str | None) -> str:
    """The error that the training process gave, or all that is known."""
    lines = (error or "its train.log says why.").splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


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
            trained = all(progress["state"] in ("finished", "failed") for progress in state["drafters"].values())
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
    is_measured = any(progress["acceptance_length"] is not None for progress in drafters.values())
    texts = ("drafter", "algorithm", "state")
    for name in (*texts, "step", "loss", *(["acceptance"] if is_measured else []), "tokens", "tok/s", "rows"):
        table.add_column(name, justify="left" if name in texts else "right")
    for name, progress in drafters.items():
        table.add_row(
            name,
            progress["algorithm"],
            _where(progress),
            f"{progress['step']}/{progress['max_steps']}",
            f"{progress['loss']:.3f}" if progress["loss"] is not None else "",
            *([_accepted(progress)] if is_measured else []),
            f"{progress['tokens']:,}",
            f"{progress['tokens_per_s']:,.0f}",
            f"{progress['rows_admitted']:,}",
        )
    return table


def _where(progress: dict[str, Any]) -> str:
    """`training on gpu1`: owners of claims are `trainer-PID@HOST`."""
    trainer = progress["trainer"]
    return f"{progress['state']} on {trainer.rpartition('@')[2]}" if trainer else str(progress["state"])


def _accepted(progress: dict[str, Any]) -> str:
    """`2.31`, or `2.31, best 2.40 at 400` where the newest checkpoint is not the best."""
    if progress["acceptance_length"] is None:
        return ""
    newest, best = f"{progress['acceptance_length']:.2f}", progress["best"]
    if best is None or best["step"] == progress.get("acceptance_step"):
        return newest
    return f"{newest}, best {best['acceptance_length']:.2f} at {best['step']:,}"
