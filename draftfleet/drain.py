"""`draftfleet drain`: have workers end from afar, through a key in Redis that each of them looks at every two seconds.

    draftfleet:drain:PROCESS    set: this process shall drain and end; gone after a day

SIGTERM on the node does the same, and is there when Redis is not.
"""

from __future__ import annotations

import sys
import time

import redis

from draftfleet import live
from draftfleet.errors import DraftfleetError, QueueError, SettingsError
from draftfleet.live import WorkerReport
from draftfleet.queue import connect
from draftfleet.settings import Settings

KEPT_S = 86_400
LOOK_S = 1.0


class UnknownNode(DraftfleetError):
    """No live worker has that name."""


def order(client: redis.Redis, process: str) -> None:
    client.set(_key(process), 1, ex=KEPT_S)


def is_ordered(client: redis.Redis, process: str) -> bool:
    return bool(client.exists(_key(process)))


def drain(settings: Settings, *, node: str | None, all_nodes: bool, wait: bool) -> list[str]:
    """Order it, and wait until the processes are gone, with their rows in flight on standard error.

    Returns their names. `node` is a host or a process as `status` shows it. Raises SettingsError, or UnknownNode, which
    lists the live ones.
    """
    if bool(node) == all_nodes:
        raise SettingsError("name one node, a host or a process as `draftfleet status` shows it, or give --all.")
    client = connect(settings)
    try:
        reports = live.read(client)
        chosen = [report for report in reports if all_nodes or node in (report.host, report.process)]
        if not chosen:
            raise UnknownNode(_unknown(node, reports))
        names = [report.process for report in chosen]
        for name in names:
            order(client, name)
        if wait:
            _wait(client, names)
    except redis.RedisError as error:
        raise QueueError(f"Redis failed: {error}. Ask again, or send the worker a SIGTERM on its node.") from error
    return names


def _wait(client: redis.Redis, names: list[str]) -> None:
    said = ""
    while left := [report for report in live.read(client) if report.process in names]:
        for report in left:
            order(client, report.process)  # again: a Redis that was restarted may have lost it
        text = ", ".join(f"{report.process}: {report.state}, {report.rows_in_flight} rows in flight" for report in left)
        if text != said:
            print(text, file=sys.stderr, flush=True)
        said = text
        time.sleep(LOOK_S)


def _unknown(node: str | None, reports: list[WorkerReport]) -> str:
    if not reports:
        return "no worker is live: there is nothing to drain."
    listing = "\n".join(f"  {report.host}  {report.process}  ({report.state})" for report in reports)
    return f"no live worker is called {node}. Live are, by host and process:\n{listing}"


def _key(process: str) -> str:
    return f"draftfleet:drain:{process}"
