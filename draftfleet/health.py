"""Whether a worker or a trainer of this machine works: it says so itself, every few seconds, in a file of its own.

A process may be there and do nothing: frozen, or with a thread that hangs. So each part that has to come round again
and again tells its pulse when it did. Where one is overdue, `draftfleet health` fails and systemd's watchdog is not
fed. Who waits for Redis, for a server or for the storage comes round all the same: another start would not help it.

RUNTIME/pulse-ROLE-PID.json    {"at": of this machine's monotonic clock, "state": in words, "overdue": {part: seconds}}
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from draftfleet import runtime
from draftfleet.errors import SettingsError
from draftfleet.logs import event

log = logging.getLogger(__name__)

ROLES = ("worker", "trainer")

BEAT_S = 2.0
SILENT_S = 30.0
"""A pulse of this age is that of a process that is frozen, or of a machine with no time for it."""

PATIENCE_S = 180.0
"""A part that is so much later than its interval is overdue. Whatever waits for Redis gives up sooner."""


@dataclass(frozen=True, slots=True)
class Beat:
    """`at` is a time of the monotonic clock, which all processes of a machine share."""

    at: float
    state: str
    overdue: dict[str, float]


class Pulse:
    """A context manager: the file is there while it is open. `state` says in words what the process is doing."""

    def __init__(self, role: str, *, patience_s: float = PATIENCE_S, beat_s: float = BEAT_S) -> None:
        self.state: Callable[[], str] = lambda: "starting"
        self._path = runtime.folder() / f"pulse-{role}-{os.getpid()}.json"
        self._patience_s = patience_s
        self._beat_s = beat_s
        self._due: dict[str, tuple[float, float]] = {}
        self._leaving = threading.Event()
        self._has_said = False
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def turned(self, part: str, interval_s: float = 0) -> None:
        """This part has come round; it will again after so many seconds. From any thread."""
        self._due[part] = time.monotonic(), interval_s

    def excuse(self, part: str) -> None:
        """It cannot come round for a reason that is not its own. Its time begins anew."""
        if part in self._due:
            self.turned(part)

    def over(self, part: str) -> None:
        """It has ended as it should."""
        self._due.pop(part, None)

    async def turns(self, part: str) -> None:
        """This event loop is a part, until it ends."""
        while True:
            self.turned(part)
            await asyncio.sleep(1)

    def __enter__(self) -> Self:
        runtime.prepare(self._path.parent)
        for path, pid in _pulses(self._path.parent):
            if not _is_alive(pid):
                path.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        self._thread.join(self._beat_s)
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        self._beat("READY=1\n")
        while not self._leaving.wait(self._beat_s):
            self._beat()
        _tell_systemd("STOPPING=1")

    def _beat(self, first: str = "") -> None:
        now = time.monotonic()
        overdue = {
            part: round(now - at, 1)
            for part, (at, interval_s) in self._due.copy().items()
            if now - at > interval_s + self._patience_s
        }
        beat = Beat(now, self.state(), overdue)
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(asdict(beat)))
            new.replace(self._path)
        except OSError as error:  # no work stops for it; who looks finds it silent
            if not self._has_said:
                log.warning(event("pulse not written", file=self._path, error=error))
            self._has_said = True
        _tell_systemd(first + f"STATUS={_words(beat)}" + ("" if beat.overdue else "\nWATCHDOG=1"))


def show(role: str) -> int:
    """Print how each process of this role and of this user is. Returns 1 if there is none, or one that does not work.

    Raises SettingsError for a role that has no pulse.
    """
    if role not in ROLES:
        raise SettingsError(f"{role} has no pulse: ask for one of {', '.join(ROLES)}.")
    folder = runtime.folder()
    found = {pid: path for path, pid in _pulses(folder, role) if _is_alive(pid)}
    if not found:
        print(f"draftfleet: no {role} of this user runs here ({folder} has no pulse of one).", file=sys.stderr)
        return 1
    works = True
    for pid, path in sorted(found.items()):
        try:
            beat = Beat(**json.loads(path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError) as error:
            print(f"{role} {pid}: its pulse cannot be read: {error}")
            works = False
            continue
        age_s = time.monotonic() - beat.at
        silent = f", and has said nothing for {age_s:.0f} s" if age_s > SILENT_S else ""
        print(f"{role} {pid}: {_words(beat)}{silent}")
        works = works and not silent and not beat.overdue
    return 0 if works else 1


def _words(beat: Beat) -> str:
    stuck = ", ".join(f"{part} has stood still for {age:.0f} s" for part, age in beat.overdue.items())
    return f"{beat.state}; {stuck}" if stuck else beat.state


def _pulses(folder: Path, role: str = "*") -> Iterator[tuple[Path, int]]:
    for path in folder.glob(f"pulse-{role}-*.json"):
        yield path, int(path.stem.rpartition("-")[2])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the number is another user's by now
        return False
    return True


def _tell_systemd(text: str) -> None:
    """sd_notify(3), where a unit of Type=notify started this process."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.connect(f"\0{address[1:]}" if address[0] == "@" else address)
            to.sendall(text.encode())
    except OSError as error:
        log.debug(event("systemd not told", error=error))
