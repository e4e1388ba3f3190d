"""Processes that are there already: on this node, and in the fleet."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil
import redis

import draftfleet
from draftfleet import live
from draftfleet.addresses import expand
from draftfleet.errors import QueueError, RunBusy
from draftfleet.live import WorkerReport
from draftfleet.queue import connect, make_app
from draftfleet.settings import Settings
from workers.doctor.case import Case
from workers.doctor.findings import Finding, fault, ok, skipped, warning
from workers.node_lock import NodeLock

WORKS = ("work", "join", "up")
"""Verbs whose process takes batches, or has a child that does."""

STAYS = ("trainer", "flower", "produce")


@dataclass(frozen=True, slots=True)
class Process:
    """One that runs on this node. `verb` is that of draftfleet, or `celery` for a Celery worker of another product."""

    pid: int
    verb: str
    started_at: float
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid}, started {_shown(self.started_at)}: {self.command}"


def look(case: Case) -> Iterator[Finding]:
    yield from _locks(case)
    found = on_this_node()
    try:
        with connect(case.settings, is_hasty=True) as client:
            case.workers = live.read(client)
    except (QueueError, redis.RedisError) as error:
        yield from _here(found, [])
        yield skipped("fleet", f"Redis does not tell: {error}")
        return
    yield from _here(found, case.workers)
    yield from _fleet(case)


def _locks(case: Case) -> Iterator[Finding]:
    """Servers that another worker of this node owns: `draftfleet work` would be refused."""
    with NodeLock() as lock:
        for address in expand(case.settings.worker.servers):
            try:
                lock.take(address.url)
            except RunBusy as error:
                found = str(error).partition(". One process")[0]
                pid = found.partition("pid ")[2].partition(",")[0]
                fix = f"`kill {pid}` drains it" if pid.isdigit() else "`ps aux`, then stop it"
                yield fault("server taken", found, fix, server=address.url, pid=int(pid) if pid.isdigit() else None)


def on_this_node() -> list[Process]:
    """Those of draftfleet, and other Celery workers, without this process and its parents."""
    family = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found: list[Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            argv = process.cmdline()
            verb = verb_of(argv)
            if verb and process.pid not in family and process.status() != psutil.STATUS_ZOMBIE:
                found.append(Process(process.pid, verb, process.create_time(), " ".join(argv)[:120]))
    return found


def verb_of(argv: Sequence[str]) -> str:
    """What a command line does for draftfleet, `celery` for a Celery worker; "" for anything else."""
    words = [PurePath(word).name for word in argv[:4]]
    for program in ("draftfleet", "celery"):
        if program not in words:
            continue
        rest = [word for word in argv[words.index(program) + 1 :] if not word.startswith("-")]
        if program == "draftfleet":
            return rest[0] if rest and rest[0] in (*WORKS, *STAYS) else ""
        return "celery" if "worker" in rest else ""
    return ""


def _here(found: Sequence[Process], reports: Sequence[WorkerReport]) -> Iterator[Finding]:
    models = {report.pid: report.model for report in reports if report.host == socket.gethostname()}
    workers = [one for one in found if one.verb in (*WORKS, "celery")]
    for process in workers:
        if process.verb == "celery":
            text, fix = f"a Celery worker of something else runs here: {process}", f"`kill {process.pid}`, if it is old"
        else:
            of_model = f" for {models[process.pid]}" if models.get(process.pid) else ""
            text, fix = f"a worker{of_model} runs on this node already: {process}", f"`kill {process.pid}` drains it"
        yield warning("this node", text, fix, pid=process.pid, started_at=process.started_at)
    if not workers:
        others = [f"draftfleet {one.verb} (pid {one.pid})" for one in found]
        yield ok("this node", f"no worker runs here{'; ' if others else ''}{', '.join(others)}")


def _fleet(case: Case) -> Iterator[Finding]:
    for report in case.workers:
        version = report.version or "before 0.2"
        text = (
            f"{report.process}, started {_shown(report.started_at)}, {report.state} on "
            f"{report.model or 'no model yet'}, draftfleet {version}"
        )
        values = {"process": report.process, "version": version, "host": report.host, "pid": report.pid}
        if report.version != draftfleet.__version__:
            fix = f"`draftfleet drain {report.host}`, then start it with {draftfleet.__version__} as here"
            yield warning("fleet", f"{text}; this node has {draftfleet.__version__}", fix, **values)
        else:
            yield ok("fleet", text, **values)
    known = {f"worker-{report.pid}@{report.host}" for report in case.workers}
    answering = _answering(case.settings, case.limits.ping_s)
    if answering is None:
        yield skipped("celery", "this user of Redis may not ask the workers")
        return
    strangers = [name for name in answering if name not in known and not name.startswith("trainer-")]
    for name in strangers:
        yield warning(
            "celery",
            f"{name} answers on this Redis and reports nothing as workers of this version do: an older one, or another "
            "product",
            "end it there, or give it a database of its own: queue.url with another number at its end",
            name=name,
        )
    if not case.workers and not strangers:
        yield ok("fleet", "no worker is on duty")


def _answering(settings: Settings, ping_s: float) -> list[str] | None:
    """Names of Celery workers that answer a ping; None where it may not be sent."""
    try:
        app = make_app(settings)
        app.conf.broker_connection_retry = False
        return sorted(app.control.inspect(timeout=ping_s).ping() or {})
    except (redis.RedisError, OSError):
        return None
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "kombu":
            return None
        raise


def _shown(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
