"""`draftfleet down`: stop what runs in a folder, wherever it was started, and `draftfleet up --status`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import redis

from draftfleet import live
from draftfleet.errors import QueueError, RunBusy
from draftfleet.queue import connect
from draftfleet.settings import Settings
from draftfleet.up import hold
from draftfleet.up.hold import Holder

LOOK_S = 0.2
SAY_S = 5.0
KILL_AFTER_S = 20.0
"""With --now: after so many seconds what still runs is killed."""

SPARE_S = 30.0
"""Beyond the longest that a drain may take."""


def down(settings: Settings, *, now: bool) -> dict[str, Any]:
    """Drain and stop it, and wait. Returns what it did; raises RunBusy where it runs on another machine."""
    folder = Path(settings.queue.embedded_dir).absolute()
    holder, runs = hold.find(folder)
    if not runs:
        return _nothing(folder, holder)
    if holder is None or not holder.lives:
        where = "another machine" if holder is None else f"another machine or has just changed: {holder.named}"
        raise RunBusy(f"what runs in {folder} is on {where}. Say `draftfleet down` there, or try again.")
    reports = _reports(settings, holder)
    said: dict[str, Any] = {
        "stopped": holder.named,
        "rows_in_flight": sum(report.rows_in_flight for report in reports),
        "batches_held": sum(report.batches_held for report in reports),
    }
    began = time.monotonic()
    how = _end(settings, holder, began, now=now)
    return said | {"how": how, "seconds": round(time.monotonic() - began, 1)}


def standing(settings: Settings) -> dict[str, Any] | None:
    """What runs in the folder; None, with a word on standard error, where nothing does."""
    folder = Path(settings.queue.embedded_dir).absolute()
    holder, runs = hold.find(folder)
    if not runs or holder is None:
        said = _nothing(folder, holder)["stopped"] if holder and not runs else f"nothing runs in {folder}"
        print(said, file=sys.stderr)
        return None
    reports = _reports(settings, holder)
    return {
        "up": holder.named,
        "state": holder.state,
        "parts": {name: f"pid {pid}" for name, pid in holder.parts.items()},
        "flower": holder.flower_url,
        "login": holder.flower_login,
        "logs": holder.logs,
        "storage": holder.storage,
        "servers": {server.url: server.state for report in reports for server in report.servers},
        "rows_in_flight": sum(report.rows_in_flight for report in reports),
    }


def _nothing(folder: Path, holder: Holder | None) -> dict[str, Any]:
    """What a dead process left is removed, so that it is told once."""
    if holder is None:
        return {"stopped": f"nothing: nothing runs in {folder}"}
    hold.forget(folder)
    ended = f"{holder.named}, has ended without being told to, or with its machine; its logs are in {holder.logs}"
    return {"stopped": f"nothing: {ended}"}


def _end(settings: Settings, holder: Holder, began: float, *, now: bool) -> str:
    """Returns how it ended."""
    _signal(holder, signal.SIGTERM)
    limit_s = settings.worker.longest_stop_s + SPARE_S
    said_at, hurried = began, False
    while holder.lives:
        passed_s = time.monotonic() - began
        if now and not hurried and passed_s >= LOOK_S:  # two that come at once are one
            hurried = True
            _signal(holder, signal.SIGTERM)
        if passed_s >= (KILL_AFTER_S if now else limit_s):
            _signal(holder, signal.SIGKILL)  # the kernel ends its children
            while holder.lives:
                time.sleep(LOOK_S)
            return f"killed after {passed_s:.0f} s"
        if time.monotonic() - said_at >= SAY_S:
            said_at = time.monotonic()
            _say(_reports(settings, holder), passed_s, limit_s)
        time.sleep(LOOK_S)
    return "put aside what was in flight" if now else "drained"


def _say(reports: list[live.WorkerReport], passed_s: float, limit_s: float) -> None:
    rows = sum(report.rows_in_flight for report in reports)
    what = f"{rows:,} requests in flight" if reports else "its processes end"
    print(f"draining for {passed_s:.0f} s of {limit_s:.0f} at most: {what}", file=sys.stderr, flush=True)


def _reports(settings: Settings, holder: Holder) -> list[live.WorkerReport]:
    """Of its worker, which may be one of several at this Redis."""
    try:
        reports = live.read(connect(settings, is_hasty=True))
        return [report for report in reports if report.host == holder.host and report.pid in holder.parts.values()]
    except (QueueError, redis.RedisError):
        return []


def _signal(holder: Holder, number: int) -> None:
    if holder.lives:
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder.pid, number)
