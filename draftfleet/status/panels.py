"""The state of a run as text and tables, in windows of any width. Colours say nothing that the words do not say too."""

from __future__ import annotations

import re
import time
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from draftfleet.status import figures
from draftfleet.status.advice import warnings
from draftfleet.tables import Fitted, Packed

LONGEST_BAR, SHORTEST_BAR = 40, 10
"""Columns. Where there is room for less, the figures stand alone."""

WHOSE = re.compile(r"^prompt \S+ on \S+: ")
"""How the error of a refused row begins."""

OUTCOMES = ("ok", "truncated", "failed")


def render(state: dict[str, Any]) -> RenderableType:
    """How far it is, who is at work on it, why rows failed, its drafters; then what needs a person."""
    return Group(body(state), last(state))


def body(state: dict[str, Any]) -> RenderableType:
    """Everything but the last words."""
    parts: list[RenderableType] = [_title(state), *_progress(state), _rows(state)]
    parts += [Packed(items) for items in (_pace(state), _wasted(state), _room(state), _asked(state["drawn"])) if items]
    if len(state["nodes"]) > 1:
        parts.append(_nodes(state))
    if any(worker["servers"] for worker in state["workers"]):
        parts.append(_servers(state["workers"]))
    if state["errors"]["classes"]:
        parts.append(_errors(state))
    if state["drafters"]:
        parts.append(_drafters(state["drafters"]))
    return Group(*parts)


def last(state: dict[str, Any]) -> RenderableType:
    """What a person should know, and in the last line what to do next, where there is something to do."""
    lines = [Text(warning, style="yellow") for warning in warnings(state)]
    if state["next"]:
        lines.append(Text(f"Next: {state['next']['do']}", style="bold"))
    return Group(*lines)


def finished(state: dict[str, Any]) -> int:
    """Rows that have an outcome, those included that stand in no shard yet: workers tell of them."""
    told = [run for worker in state["workers"] for run in worker["runs"] if run["run"] == state["run"]]
    in_hand = sum(run[outcome] for run in told for outcome in OUTCOMES)
    return sum(state[outcome] for outcome in OUTCOMES) + min(in_hand, state["pending"])


def line(state: dict[str, Any]) -> str:
    """All of it in one line, for a log: `run r: 1,200 of 5,000 rows (24 %), 1,203 tok/s, 12 min left`."""
    parts = [f"{finished(state):,} of {_total(state)} rows{_percent(state)}", *_pace(state)]
    parts += [f"{state['failed']:,} failed"] if state["failed"] else []
    said = f"run {state['run']}: {', '.join(parts)}"
    return f"{said}. Next: {state['next']['do']}" if state["next"] else said


class Bar:
    """How much is done, and that in figures, in one line."""

    def __init__(self, share: float, figures: str) -> None:
        self._share = share
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(LONGEST_BAR, options.max_width - len(self._figures) - 1)
        if width < SHORTEST_BAR:
            yield Text(self._figures)
            return
        done = int(self._share * width)
        yield Text.assemble(("━" * done, "green"), ("╌" * (width - done), "dim"), " ", self._figures)


def _title(state: dict[str, Any]) -> Text:
    ordered = state["control"]
    said = [ordered["state"]] if ordered["state"] != "running" else []
    said += [f"{ordered['priority']} priority"] if ordered["priority"] != "normal" else []
    said += [f"budget {ordered['token_budget']:,} tokens"] if ordered["token_budget"] else []
    return Text.assemble((f"run {state['run']}", "bold"), f" ({', '.join(said)})" if said else "")


def _total(state: dict[str, Any]) -> str:
    return "…" if state["expected"] is None else f"{state['expected']:,}"


def _percent(state: dict[str, Any]) -> str:
    return f" ({finished(state) / state['expected']:.1%})" if state["expected"] else ""


def _progress(state: dict[str, Any]) -> list[RenderableType]:
    if not state["expected"]:
        return []
    return [Bar(finished(state) / state["expected"], f"{finished(state):,} of {_total(state)} rows{_percent(state)}")]


def _rows(state: dict[str, Any]) -> RenderableType:
    table = Table()
    has_more_turns = state["turns"] != state["ok"] + state["truncated"]
    columns = (*OUTCOMES, "pending", *(["turns"] if has_more_turns else []), "tokens")
    for name in ("expected", *columns, "batches done", "queue"):
        table.add_column(name, justify="right")
    batches, waiting = state["batches"], state["queue"]["waiting"]
    table.add_row(
        _total(state),
        *(f"{state[name]:,}" for name in columns),
        f"{batches['done']:,}/{batches['batches']:,}",
        "away" if waiting is None else f"{waiting:,}",
    )
    return Fitted(table, leave=("queue", "batches done", "turns", "expected"))


def _pace(state: dict[str, Any]) -> list[str]:
    found, items = state["throughput"], list[str]()
    if state["workers"] and state["pending"]:
        items.append(f"{figures.rate(found['tokens_per_s'])} tok/s now")
    if found["mean_tokens_per_s"] is not None:
        items.append(f"{figures.rate(found['mean_tokens_per_s'])} tok/s on average")
    if found["share_of_full"] is not None:
        items.append(f"{figures.share(found['share_of_full'])} of what full servers make")
    return [*items, *_left(state)]


def _left(state: dict[str, Any]) -> list[str]:
    eta = state.get("eta")
    if not eta or not state["pending"]:
        return []
    if eta["seconds"] is None:
        return [f"time left not known: {eta['why']}"]
    until = time.strftime("%a %H:%M", time.localtime(state["looked_at"] + eta["seconds"]))
    of_now = "" if eta["is_final"] else " for the rows that are there"
    return [f"{figures.seconds(eta['seconds'])} left{of_now} (until about {until})"]


def _wasted(state: dict[str, Any]) -> list[str]:
    causes = state["wasted_tokens"]
    if not (total := sum(causes.values())):
        return []
    kept = sum(server["tokens"] for worker in state["workers"] for server in worker["servers"])
    first, *others = [f"{cause} {tokens:,}" for cause, tokens in causes.items()]
    return [f"{total:,} tokens wasted ({total / max(kept + total, 1):.1%}): {first}", *others]


def _room(state: dict[str, Any]) -> list[str]:
    storage, held, items = state["storage"], state["redis"], list[str]()
    if storage["free_bytes"] is not None:
        items.append(f"storage {figures.size(storage['free_bytes'])} left")
    if storage["needed_bytes"]:
        items.append(f"about {figures.size(storage['needed_bytes'])} to come")
    if held["used_bytes"] is not None:
        limit = f" of {figures.size(held['limit_bytes'])}" if held["limit_bytes"] else ""
        items.append(f"Redis {figures.size(held['used_bytes'])}{limit} in memory")
    if held["disk_free_bytes"] is not None:
        items.append(f"Redis disk {figures.size(held['disk_free_bytes'])} left")
    return items


def _asked(drawn: list[dict[str, Any]]) -> list[str]:
    """`asked with thinking on 50.2 % (502 rows), thinking off 49.8 % (498 rows)`"""
    ways: list[str] = []
    for way in drawn:
        knobs = [f"{name} {figures.knob(value)}" for name, value in way.items() if name not in ("rows", "share")]
        rows = "" if way["rows"] is None else f" ({way['rows']:,} rows)"
        ways.append(f"{' and '.join(knobs)} {way['share']:.1%}{rows}")
    return [f"asked with {ways[0]}", *ways[1:]] if ways else []


def _nodes(state: dict[str, Any]) -> RenderableType:
    table = Table(title="nodes", title_justify="left")
    for name in ("node", *OUTCOMES, "tokens", "tok/s", "in flight", "shards", "last shard"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for node in state["nodes"]:
        ago = None if node["last_shard_at"] is None else max(state["looked_at"] - node["last_shard_at"], 0)
        table.add_row(
            node["node"],
            *(f"{node[name]:,}" for name in (*OUTCOMES, "tokens")),
            figures.rate(node["tokens_per_s"]) if node["workers"] else "no worker",
            f"{node['in_flight']:,}" if node["workers"] else "",
            f"{node['shards']:,}",
            "" if ago is None else f"{figures.seconds(ago)} ago",
        )
    return Fitted(table, leave=("shards", "tokens", "truncated", "last shard"))


def _servers(workers: list[dict[str, Any]]) -> RenderableType:
    table = Table(title="workers", title_justify="left")
    for name in ("worker", "state", "server", "server state", "in flight", "limit", "because", "KV", "rows", "tok/s"):
        is_text = name.startswith("s") or name in {"worker", "because"}
        table.add_column(name, justify="left" if is_text else "right")
    for worker in workers:
        for server in worker["servers"]:
            table.add_row(
                worker["process"],
                worker["state"],
                figures.address(server["url"]),
                server["state"],
                str(server["in_flight"]),
                str(server["limit"]),
                server["because"],
                figures.share((server["gauges"] or {}).get("kv")),
                f"{server['rows']:,}",
                figures.rate(server["tokens_per_s"]),
                style=None if server["state"] == "ready" else "yellow",
            )
    return Fitted(table, leave=("because", "KV", "rows", "state"))


def _errors(state: dict[str, Any]) -> RenderableType:
    found = state["errors"]
    unread = state["failed"] - found["rows"]
    table = Table(title=f"failed rows, {unread:,} more not read" if unread > 0 else "failed rows", title_justify="left")
    for name in ("kind", "status", "rows", "for example"):
        table.add_column(name, justify="right" if name in ("status", "rows") else "left")
    for one in found["classes"]:
        status = "" if one["status"] is None else str(one["status"])
        table.add_row(one["kind"], status, f"{one['rows']:,}", _shown(one["example"]))
    return Fitted(table, elastic="for example")


def _shown(error: str) -> str:
    """In one line, without the prompt and the server that stand apart in the state."""
    return WHOSE.sub("", " ".join(error.split()))


def _drafters(drafters: dict[str, Any]) -> RenderableType:
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
            f"{progress['step']:,}/{progress['max_steps']:,}",
            f"{progress['loss']:.3f}" if progress["loss"] is not None else "",
            *([_accepted(progress)] if is_measured else []),
            f"{progress['tokens']:,}",
            figures.rate(progress["tokens_per_s"]),
            f"{progress['rows_admitted']:,}",
        )
    return Fitted(table, leave=("tokens", "rows", "tok/s", "algorithm"))


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
