"""Redis: whether it answers, keeps what it is given, and lets this user do a worker's work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import redis

from draftfleet import connection, embedded
from draftfleet.errors import QueueError, QueueRefused
from draftfleet.queue import connect
from workers.doctor import clocks, estimate
from workers.doctor.acl import refused
from workers.doctor.case import Case
from workers.doctor.findings import Finding, fault, of_error, ok, skipped, warning

OLDEST = (7, 0)
"""Older ones know no ACL as docker/redis/users.acl has it."""

PINGS = 20
SLOW_S = 0.02
REFERENCE_BYTES = 1_300
"""Of one message in Redis: a million prompts in batches of 64 took 20 MB."""

NEARLY = 0.8
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def look(case: Case) -> Iterator[Finding]:
    try:
        client = connect(case.settings, is_hasty=True)
    except QueueRefused as error:
        yield of_error("login", error, level="fault")
        return
    except QueueError as error:
        yield _away(case, error)
        return
    with client:
        where = connection.shown(connection.address(case.settings))
        yield ok("answers", f"{where} answers, the login is accepted", address=where)
        yield from _open_to_all(case)
        yield _latency(client, where)
        yield _clock(case, client)
        yield _rights(client)
        try:
            case.redis_info = info = dict(client.info())
        except redis.RedisError as error:
            yield skipped("state", f"INFO is refused: {error}")
            return
    yield from _about(info)


def _away(case: Case, error: QueueError) -> Finding:
    if case.settings.queue.url is not None:
        return of_error("answers", error)
    try:
        program = embedded.binary()
    except QueueError as missing:
        return of_error("answers", missing)
    return warning(
        "answers",
        f"queue.url is not set and no embedded Valkey runs in {case.settings.queue.embedded_dir}; it can be started "
        f"({program.rpartition('/')[2]})",
        "`draftfleet up` starts it, and a worker with it",
    )


def _open_to_all(case: Case) -> Iterator[Finding]:
    url = urlsplit(connection.address(case.settings))
    if not url.password and url.hostname not in LOOPBACK:
        yield warning(
            "password",
            "it lets everybody in who reaches its port: no password is set",
            "`requirepass` or an ACL file in redis.conf (docs/security.md), and queue.password_file",
        )


def _latency(client: redis.Redis, where: str) -> Finding:
    seconds: list[float] = []
    for _ in range(PINGS):
        begun = time.monotonic()
        client.ping()
        seconds.append(time.monotonic() - begun)
    median_s = statistics.median(seconds)
    found = f"{median_s * 1000:.1f} ms a round trip, {max(seconds) * 1000:.1f} ms at worst"
    if median_s > SLOW_S:
        return warning("latency", found, f"a Redis nearer to this node than {where}", median_s=median_s)
    return ok("latency", found, median_s=median_s)


def _clock(case: Case, client: redis.Redis) -> Finding:
    before = case.now()
    seconds, micros = client.time()
    after = case.now()
    skew_s = int(seconds) + int(micros) / 1e6 - (before + after) / 2
    return clocks.compared("Redis", skew_s, case.settings.claims)


def _rights(client: redis.Redis) -> Finding:
    if commands := refused(client):
        return fault(
            "rights",
            f"this user may not do what a worker does: {', '.join(commands)}",
            "give it the rights of `worker` in docker/redis/users.acl, then `ACL LOAD`",
            refused=commands,
        )
    return ok("rights", "this user may do all that a worker does")


def _about(info: dict[str, Any]) -> Iterator[Finding]:
    yield _version(info)
    yield _append_only(info)
    yield _eviction(info)
    yield from _writes(info)


def _version(info: dict[str, Any]) -> Finding:
    is_valkey = info.get("server_name") == "valkey"
    name, version = "Valkey" if is_valkey else "Redis", str(info.get("valkey_version") or info.get("redis_version"))
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < OLDEST:
        return warning(
            "version", f"{name} {version}: tried are 7 and newer", "a newer Redis or Valkey", version=version
        )
    return ok("version", f"{name} {version}", version=version)


def _append_only(info: dict[str, Any]) -> Finding:
    if info.get("aof_enabled"):
        return ok("append only", "appendonly = yes")
    return warning(
        "append only",
        "appendonly = no: a restart of Redis loses the queue, until the reconciler has published it again",
        "`redis-cli CONFIG SET appendonly yes`, and the same in redis.conf",
    )


def _eviction(info: dict[str, Any]) -> Finding:
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    values = {"policy": policy, "maxmemory_bytes": limit}
    if policy == "noeviction":
        return ok("eviction", "maxmemory-policy = noeviction", **values)
    level = fault if limit else warning
    when = f"above maxmemory = {estimate.shown(limit)}" if limit else "should maxmemory be set"
    return level(
        "eviction",
        f"maxmemory-policy = {policy}: {when}, Redis throws away queued work and claims",
        "`redis-cli CONFIG SET maxmemory-policy noeviction`, and the same in redis.conf",
        **values,
    )


def _writes(info: dict[str, Any]) -> Iterator[Finding]:
    """What keeps Redis from taking writes, or would."""
    if info.get("role", "master") != "master":
        yield fault("role", "it is a replica, which takes no writes", "queue.url of the primary")
    if info.get("loading"):
        yield warning("persistence", "it still reads its data from disk", "wait, then `draftfleet doctor` again")
    failed = {
        name: info[name]
        for name in ("aof_last_write_status", "rdb_last_bgsave_status", "aof_last_bgrewrite_status")
        if info.get(name, "ok") != "ok"
    }
    if failed:
        said = ", ".join(f"{name} = {value}" for name, value in failed.items())
        yield fault(
            "persistence", f"it cannot write its data to disk: {said}", "room on the disk of Redis: `df`", **failed
        )
    else:
        yield ok("persistence", "its last writes to disk were well")
    used, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    if most and used > NEARLY * most:
        yield warning("clients", f"{used} of {most} connections are taken", "`redis-cli CONFIG SET maxclients 10000`")


def room(case: Case) -> Iterator[Finding]:
    """Its memory against what the run will put into it."""
    info = case.redis_info
    if not info:
        yield skipped("memory", "its state is unknown")
        return
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    limit = limit or int(info.get("total_system_memory", 0))
    batches = estimate.num_batches(case)
    wanted = (batches or 0) * REFERENCE_BYTES
    values = {"used_bytes": used, "limit_bytes": limit, "wanted_bytes": wanted}
    of_run = f"the run's {batches:,} batches need {estimate.shown(wanted)}" if batches else "the run's size is unknown"
    found = f"{estimate.shown(used)} of {estimate.shown(limit)} used, {of_run}"
    fix = "`redis-cli CONFIG SET maxmemory` with more, or a larger producer.batch_size"
    if limit and used + wanted > limit:
        yield fault("memory", found, fix, **values)
    elif limit and used + wanted > NEARLY * limit:
        yield warning("memory", found, fix, **values)
    else:
        yield ok("memory", found, **values)
