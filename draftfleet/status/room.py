"""What is left of disk and memory: in the storage, and for Redis."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any, Final

import redis

from draftfleet.accounting import Accountant
from draftfleet.errors import StorageError
from draftfleet.settings import Settings

GB = 1e9

UNKNOWN_REDIS: Final[dict[str, Any]] = {
    "used_bytes": None, "limit_bytes": None, "disk_free_bytes": None, "can_write": None,
}  # fmt: skip


def of_storage(accountant: Accountant, settings: Settings, *, pending: int) -> dict[str, Any]:
    """`needed_bytes` is what the pending rows will take if they are like those in shards; None before there is one."""
    free: int | None = None
    with contextlib.suppress(StorageError):
        free = accountant.run.storage.free_bytes()
    entries = accountant.entries.values()
    rows, taken = sum(entry.rows for entry in entries), sum(entry.bytes for entry in entries)
    return {
        "url": accountant.run.storage.url,
        "free_bytes": free,
        "min_free_bytes": int(settings.storage.min_free_gb * GB),
        "samples_bytes": sum(accountant.done.values()),
        "needed_bytes": round(taken / rows * pending) if rows else None,
    }


def of_redis(client: redis.Redis, settings: Settings) -> dict[str, Any]:
    """What this user may know of it. Its disk is known where it is the embedded one of this machine."""
    found = dict(UNKNOWN_REDIS)
    with contextlib.suppress(redis.ResponseError):  # a user without INFO
        memory = client.info("memory")
        kept = client.info("persistence")
        found["used_bytes"] = int(memory["used_memory"])
        found["limit_bytes"] = int(memory.get("maxmemory") or 0) or None
        found["can_write"] = kept.get("aof_last_write_status", "ok") == "ok"
    if settings.queue.url is None:
        with contextlib.suppress(OSError):
            found["disk_free_bytes"] = shutil.disk_usage(settings.queue.embedded_dir).free
    return found
