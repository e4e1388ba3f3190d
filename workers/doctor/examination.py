"""All looks, in three rounds: those of a round run side by side, each until its own deadline.

A look is a generator of findings in a thread of its own. One that fails or hangs keeps no other from being made: what
it found until then stays, and its end is a finding too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from draftfleet.errors import DraftfleetError
from draftfleet.logs import event
from workers.doctor import (
    canary,
    gpu,
    processes,
    queue,
    run,
    servers,
    settings,
    storage,
    timeouts,
    tokenizer,
)
from workers.doctor.case import Case, Limits
from workers.doctor.findings import Finding, fault, of_error

log = logging.getLogger(__name__)

Look = Callable[[Case], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Part:
    """`hint` is what to do where it does not end. `is_long`: it waits for answers of servers."""

    subject: str
    look: Look
    hint: str
    is_long: bool = False

    def limit_s(self, limits: Limits) -> float:
        return limits.canary_s if self.is_long else limits.look_s


_OF_REDIS = "look whether something between this node and Redis drops packets: `nc -vz HOST PORT`"
_OF_STORAGE = "look at the file system: `df STORAGE`, `dmesg | tail`; a hanging mount is mounted again"
_OF_SERVERS = "look at the servers' own logs"
_OF_NODE = "look at the load of this node: `uptime`, `dmesg | tail`"

ROUNDS: tuple[tuple[Part, ...], ...] = (
    (
        Part("settings", settings.look, _OF_NODE),
        Part("run", run.look, _OF_STORAGE),
        Part("redis", queue.look, _OF_REDIS),
        Part("storage", storage.look, _OF_STORAGE),
        Part("servers", servers.look, _OF_SERVERS),
        Part("tokenizer", tokenizer.load, _OF_NODE),
        Part("processes", processes.look, _OF_REDIS),
        Part("gpu", gpu.look, "the driver hangs: `nvidia-smi`, `dmesg | tail`"),
    ),
    (
        Part("run", run.compare, _OF_NODE),
        Part("tokenizer", tokenizer.compare, _OF_SERVERS, is_long=True),
        Part("canary", canary.look, _OF_SERVERS, is_long=True),
    ),
    (
        Part("servers", servers.others, _OF_SERVERS),
        Part("timeouts", timeouts.look, _OF_NODE),
        Part("storage", storage.room, _OF_STORAGE),
        Part("redis", queue.room, _OF_REDIS),
    ),
)

SUBJECTS = tuple(dict.fromkeys(part.subject for parts in ROUNDS for part in parts))
"""In the order in which they are shown."""


def examine(case: Case, on_change: Callable[[list[str]], object] = lambda _: None) -> list[Finding]:
    """Every finding, by subject. `on_change` is told which subjects are still being looked at."""
    found = [finding for parts in ROUNDS for finding in _side_by_side(parts, case, on_change)]
    return sorted(found, key=lambda finding: SUBJECTS.index(finding.subject))


@dataclass(eq=False)
class _Looking:
    """A look at work. After its deadline nothing is added any more."""

    part: Part
    findings: list[Finding] = field(default_factory=list[Finding])
    ended: threading.Event = field(default_factory=threading.Event)
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, case: Case) -> None:
        try:
            for finding in self.part.look(case):
                self.add(finding)
        except DraftfleetError as error:
            self.add(of_error("look", error))
        except Exception as error:  # a fault of ours must not cost the other findings
            log.debug(event("look failed", subject=self.part.subject), exc_info=True)
            self.add(fault("look", f"it ended with {error!r}", "`draftfleet --debug doctor` says where"))
        finally:
            self.ended.set()

    def add(self, finding: Finding) -> None:
        with self._lock:
            if not self._is_over:
                self.findings.append(replace(finding, subject=self.part.subject))

    def close(self, limit_s: float) -> list[Finding]:
        if not self.ended.is_set():
            self.add(fault("look", f"no answer within {limit_s:g} s", self.part.hint, limit_s=limit_s))
        with self._lock:
            self._is_over = True
            return list(self.findings)


def _side_by_side(parts: Sequence[Part], case: Case, on_change: Callable[[list[str]], object]) -> Iterator[Finding]:
    looking = [_Looking(part) for part in parts]
    begun = time.monotonic()
    for one in looking:
        threading.Thread(target=one.run, args=[case], name=f"doctor-{one.part.subject}", daemon=True).start()
    for one in looking:
        limit_s = one.part.limit_s(case.limits)
        while not one.ended.wait(min(0.2, max(0.0, begun + limit_s - time.monotonic()))):
            on_change(list(dict.fromkeys(other.part.subject for other in looking if not other.ended.is_set())))
            if time.monotonic() >= begun + limit_s:
                break
        yield from one.close(limit_s)
