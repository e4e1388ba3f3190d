"""The state of a run as plain data, gathered from storage, index, Redis and the workers' reports (docs/status.md)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import redis

from draftfleet import accounting, control, drawing, eta, live, trainings
from draftfleet.accounting import Accountant
from draftfleet.errors import QueueError
from draftfleet.live import WorkerReport
from draftfleet.queue import connect, queued
from draftfleet.reconcile import model_of
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import advice, room
from draftfleet.status.failures import Failures
from draftfleet.status.pace import Begin, nodes, throughput
from draftfleet.status.training import drafters

FORMAT = 1
"""Of the state. Keys are added to it; should one be renamed or mean something else, this is raised."""


@dataclass
class Seen:
    """What one look leaves for the next: shards never change."""

    failures: Failures = field(default_factory=Failures)
    begin: Begin = field(default_factory=Begin)


def collect(settings: Settings, accountant: Accountant, seen: Seen | None = None) -> dict[str, Any]:
    """The state as plain data. Redis being away is part of the state, not an error."""
    seen = seen or Seen()
    run = accountant.run
    account = accountant.account()
    state = accounting.to_json(account)
    state["format"] = FORMAT
    state["looked_at"] = round(time.time(), 3)
    state["model"] = model_of(run)
    state["drafters"] = drafters(run)
    state["control"] = control.read(run).model_dump()
    state["drawn"] = _drawn(run)
    reports: list[WorkerReport] = []
    state["redis"] = room.UNKNOWN_REDIS
    try:
        client = connect(settings)
        state["queue"] = {"waiting": queued(client, state["model"]), "error": None}
        reports = live.read(client)
        state["eta"] = eta.of_run(accountant, account, reports).to_json()
        for name, (standing, trainer) in trainings.standing(client, run, settings.claims, state["drafters"]).items():
            state["drafters"][name] |= {"state": standing, "trainer": trainer}
        state["redis"] = room.of_redis(client, settings)
    except (QueueError, redis.RedisError) as error:
        state["queue"] = {"waiting": None, "error": str(error)}
        state["eta"] = eta.Estimate(why="Redis is away").to_json()
    state["workers"] = [report.to_json() for report in reports]
    state["nodes"] = nodes(accountant, reports)
    state["throughput"] = throughput(accountant, reports, state["model"], seen.begin)
    state["wasted_tokens"] = _wasted(reports)
    state["errors"] = seen.failures.look(accountant) if state["failed"] else Failures.NONE
    state["storage"] = room.of_storage(accountant, settings, pending=state["pending"])
    state["next"] = advice.next_step(state)
    return state


def _drawn(run: Run) -> list[dict[str, Any]]:
    """How many rows are asked in which way, where there is a choice: the producer's count. Before it has finished the
    shares that are to be expected."""
    if drawn := (run.sealed() or {}).get("drawn"):
        total = sum(way["rows"] for way in drawn)
        return [way | {"share": way["rows"] / max(total, 1)} for way in drawn]
    ways = drawing.ways(drawing.asked(run))
    return [way.drawn | {"rows": None, "share": way.share} for way in ways if way.drawn]


def _wasted(reports: list[WorkerReport]) -> dict[str, int]:
    """By cause, over the live workers, each since it began; the largest first."""
    causes = {cause for report in reports for cause in report.wasted}
    wasted = {cause: sum(report.wasted.get(cause, 0) for report in reports) for cause in causes}
    return dict(sorted(wasted.items(), key=lambda one: (-one[1], one[0])))
