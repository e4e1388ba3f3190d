"""What a person should know of a run, what stands still first, and the one thing to do next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from draftfleet.status.figures import seconds, size

SILENT_S = 120.0
"""No token for so long from servers that count them: something stands still. `worker.stall_s` has passed then, too."""

SILENT_UNCOUNTED_S = 900.0
"""The same where only whole answers show that a server is at work."""

NEARLY = 0.9
"""Of its memory: from then on Redis may soon refuse messages."""

ENDED = {
    "tool_calls": "at other tool calls than the source's",
    "truncated": "at an answer cut at its length",
    "failed": "at a turn that failed",
}


class Word(NamedTuple):
    """One sentence or two, with what to do. `do` is that alone, where nothing gets on before it is done."""

    text: str
    do: str = ""


def warnings(state: dict[str, Any]) -> list[str]:
    """What a person should know, each with what to do."""
    return [word.text for word in _words(state)]


def next_step(state: dict[str, Any]) -> dict[str, str] | None:
    """What to do first, and why. None where all goes on by itself."""
    found = next((word for word in _words(state) if word.do), None)
    return None if found is None else {"because": found.text, "do": found.do}


def _words(state: dict[str, Any]) -> Iterator[Word]:
    """The most pressing first."""
    yield from _ordered(state)
    yield from _redis(state)
    yield from _storage(state)
    if state["pending"] and state["control"]["state"] == "running" and not state["queue"]["error"]:
        yield from _standing_still(state)
    yield from _rows(state)
    yield from _not_trained(state)
    yield from _reasons(state["workers"])


def _ordered(state: dict[str, Any]) -> Iterator[Word]:
    ordered, name = state["control"], state["run"]
    if ordered["state"] != "running":
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ordered["since"]))
        why = f": {ordered['reason']}" if ordered["reason"] else ""
        do = f"`draftfleet resume {name}`" if state["pending"] and ordered["state"] == "paused" else ""
        yield Word(f"the run is {ordered['state']} since {since}{why}. `draftfleet resume {name}` goes on.", do)


def _redis(state: dict[str, Any]) -> Iterator[Word]:
    if error := state["queue"]["error"]:
        do = "bring Redis back: workers keep the rows in flight and go on by themselves"
        yield Word(error, do if state["pending"] else "")
    found = state["redis"]
    if found["can_write"] is False:
        do = "make room on the disk of Redis: it cannot write its append-only file"
        yield Word("Redis cannot write its append-only file: what is queued may be lost. Make room on its disk.", do)
    if found["limit_bytes"] and found["used_bytes"] > NEARLY * found["limit_bytes"]:
        used, limit = size(found["used_bytes"]), size(found["limit_bytes"])
        yield Word(f"Redis holds {used} of at most {limit}: raise its maxmemory.", "raise the maxmemory of Redis")


def _storage(state: dict[str, Any]) -> Iterator[Word]:
    found = state["storage"]
    free, least, needed = found["free_bytes"], found["min_free_bytes"], found["needed_bytes"]
    if free is None or not state["pending"]:
        return
    where, left = found["url"], size(free)
    if free < least:
        yield Word(
            f"{where} has {left} left, and workers pause below storage.min_free_gb = {least / 1e9:g}: make room. "
            "They go on by themselves.",
            f"make room in {where}",
        )
    elif needed is not None and needed > free - least:
        yield Word(
            f"{where} has {left} left, and the pending rows need about {size(needed)}: make room in time.",
            f"make room in {where} before it is full",
        )


def _standing_still(state: dict[str, Any]) -> Iterator[Word]:
    ours = [worker for worker in state["workers"] if worker["model"] in ("", state["model"])]
    if not ours:
        do = "start `draftfleet work --servers URL,...`"
        others = ", ".join(sorted({worker["model"] for worker in state["workers"]}))
        but = f" Those that are there serve {others}." if others else ""
        yield Word(f"rows are pending and no worker is there: {do}.{but}", do)
        return
    servers = [server for worker in ours for server in worker["servers"]]
    holding = [server for server in servers if server["in_flight"]]
    silent_s = state["throughput"]["silent_s"]
    is_working = any(worker["state"] == "working" for worker in ours)
    if not any(server["state"] == "ready" for server in servers):
        yield Word(
            f"none of {len(servers)} servers is ready: their own logs say why, and `draftfleet doctor` looks at each.",
            "start the servers, or look into their logs: `draftfleet doctor` says what each lacks",
        )
    elif holding and silent_s is not None and silent_s >= _patience_s(holding):
        rows = sum(server["in_flight"] for server in holding)
        yield Word(
            f"no token for {seconds(silent_s)}, with {rows:,} requests in flight: look into the servers' own logs.",
            "look into the servers' logs and restart what hangs: no row is lost by that",
        )
    elif is_working and not state["queue"]["waiting"] and not any(worker["batches_held"] for worker in ours):
        yield Word(
            "rows are pending, and none is queued or at work: they are queued again within minutes, "
            "and `draftfleet status --repair` does it now.",
            "`draftfleet status --repair`, if this stays for some minutes",
        )


def _patience_s(holding: list[dict[str, Any]]) -> float:
    counts = all((server["gauges"] or {}).get("generated_tokens") is not None for server in holding)
    return SILENT_S if counts else SILENT_UNCOUNTED_S


def _rows(state: dict[str, Any]) -> Iterator[Word]:
    corrupt, dead = state["batches"]["corrupt"], state["batches"]["dead"]
    if corrupt:
        do = "`draftfleet verify --repair`"
        yield Word(f"{len(corrupt)} shards cannot be read ({', '.join(corrupt[:5])}): run {do}.", do)
    if dead:
        yield Word(f"{dead} rows were given up: see `draftfleet dead list`.")
    if state["mismatched"]:
        yield Word(f"{state['mismatched']} rows have ids that do not match the server's count: kept, not trained on.")
    if count := state["not_continued"]:
        do = "`draftfleet continue --max-tokens N --dry-run` says why"
        yield Word(f"{count} cut answers could not go on and stand as they are: {do}.")
    if ended := ", ".join(f"{count} {ENDED[why]}" for why, count in state["ended"].items() if count):
        yield Word(f"conversations ended before their source: {ended}. Their finished turns are kept.")
    if state["expected"] is None:
        yield Word("the producer has not finished: totals are not final.")
    if not state["identity_holds"]:
        yield Word("the rows do not add up to what was produced: please report this with the run's folder listing.")


def _not_trained(state: dict[str, Any]) -> Iterator[Word]:
    for name, one in state["drafters"].items():
        if one["state"] == "failed":
            do = f"`draftfleet train --drafter {name}`"
            yield Word(
                f"drafter {name} failed at step {one['step']:,}: {_first_error(one.get('error'))} "
                f"{do} goes on from its latest checkpoint.",
                f"mend that, then {do}",
            )
    if queued := [name for name, one in state["drafters"].items() if one["state"] == "queued"]:
        yield Word(
            f"queued for training: {', '.join(queued)}. A trainer takes one at a time: start another `draftfleet "
            "trainer`, on another node or with another trainer.device, if none is free."
        )


def _first_error(error: str | None) -> str:
    """The error that the training process gave, or all that is known."""
    lines = (error or "its train.log says why.").splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


def _reasons(workers: list[dict[str, Any]]) -> Iterator[Word]:
    for worker in workers:
        if worker["reason"]:
            yield Word(f"worker {worker['process']} is {worker['state']}: {worker['reason']}")
        for server in worker["servers"]:
            if server["reason"]:
                yield Word(f"server {server['url']} is {server['state']}: {server['reason']}")
