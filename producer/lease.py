"""One producer per run at a time: a lease in Redis, renewed by a thread, that lapses when its holder is gone.

It is a courtesy with a clear message. What makes a doubled prompt impossible is in `batches.py`: batch numbers are
dense, and of two producers that put the same number one is told so and stops.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from types import TracebackType
from typing import Any, Self

import psutil
import redis

from draftfleet import settings
from draftfleet.errors import RunBusy
from draftfleet.logs import event
from draftfleet.runs import Run

log = logging.getLogger(__name__)

_TAKE = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] and held ~= ARGV[3] then return held end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
"""
"""Take it if it is free, ours (an answer may have been lost), or still held by ARGV[3]; else return the holder."""

_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Lease:
    """Held from entry to exit. Entry raises RunBusy, naming the holder."""

    def __init__(self, client: redis.Redis, run: Run, knobs: settings.Claims) -> None:
        self._client = client
        self._run = run
        self._key = f"draftfleet:{run.run_id}:producer"
        self._ttl_ms = int(knobs.ttl_s * 1000)
        self._renew_s = knobs.renew_s
        self._me = json.dumps(_identity())
        self._taken_by: str | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="producer lease", daemon=True)

    def __enter__(self) -> Self:
        held = self._take()
        if held is not None and _is_gone(json.loads(held)):
            log.warning(event("lease of a dead producer taken over", run=self._run.name, holder=_shown(held)))
            held = self._take(replacing=held)
        if held is not None:
            raise RunBusy(self._busy(held))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._thread.join()
        try:
            self._client.eval(_RELEASE, 1, self._key, self._me)
        except redis.RedisError as away:
            log.warning(event("lease not released, it lapses", run=self._run.name, error=away))

    def check(self) -> None:
        """Raises RunBusy if another producer has taken the run over."""
        if self._taken_by is not None:
            raise RunBusy(self._busy(self._taken_by))

    def _keep(self) -> None:
        while not self._released.wait(self._renew_s):
            try:
                self._taken_by = self._take()
            except redis.RedisError as away:
                log.warning(event("lease not renewed", run=self._run.name, error=away))
                continue
            if self._taken_by is not None:
                return

    def _take(self, replacing: str = "") -> str | None:
        """None if the lease is ours now, else who holds it."""
        held: Any = self._client.eval(_TAKE, 1, self._key, self._me, str(self._ttl_ms), replacing)
        return None if held is None else str(held)

    def _busy(self, held: str) -> str:
        return (
            f"run {self._run.name} is being filled by {_shown(held)}: one producer per run at a time. "
            f"Wait for it or stop it; if its machine is gone, its lease lapses within {self._ttl_ms / 1000:.0f} s."
        )


def _identity() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "since": time.time(),
        "token": uuid.uuid4().hex,
    }


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this host that no longer lives; of other hosts nothing is known."""
    if holder["host"] != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(holder["pid"]).create_time() - holder["process_started"]) > 1
    except psutil.NoSuchProcess:
        return True


def _shown(held: str) -> str:
    holder = json.loads(held)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder["since"]))
    return f"host {holder['host']} pid {holder['pid']} since {since}"
