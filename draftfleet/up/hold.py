"""One fleet per folder: who runs in it holds a lock, and a state file (0600) says who that is.

The lock is an flock of the kernel, which goes with its process however that ends, so a file left behind holds nothing.
The state file is for people and for `draftfleet down`. Its pid counts only while the process of that pid is the one
that wrote it, by its start time: pids are used again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftfleet.embedded import write_private
from draftfleet.errors import RunBusy, SettingsError
from draftfleet.settings import Queue

DEFAULT = Queue.model_fields["embedded_dir"].default
STATE, LOCK = "up.json", "up.lock"

TRIES = 5
TRY_AGAIN_S = 0.1
"""Whoever only asks holds the lock for a moment, too."""

CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class Holder(BaseModel):
    """The process that runs in a folder. Times are seconds since the epoch; `born` is compared and nothing else."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    verb: str
    pid: int
    host: str
    born: str
    since: float
    state: Literal["starting", "ready", "draining"] = "starting"
    logs: str = ""
    storage: str = ""
    servers: list[str] = Field(default_factory=list[str])
    flower_url: str = ""
    flower_login: str = ""
    parts: dict[str, int] = Field(default_factory=dict[str, int])

    @property
    def lives(self) -> bool:
        """Whether the process that wrote this still runs on this machine."""
        return self.host == socket.gethostname() and self.born == born(self.pid)

    @property
    def named(self) -> str:
        """`draftfleet up`, pid 4211 on gpu1, since 2026-12-01 01:33:27"""
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        return f"`draftfleet {self.verb}`, pid {self.pid} on {self.host}, since {since}"


class Hold:
    """A context manager: the folder is this process' until its end.

    Raises RunBusy, naming the first, or SettingsError where the folder cannot be written.
    """

    def __init__(self, folder: str | Path, verb: str, **said: Any) -> None:
        self.folder = Path(folder).absolute()
        me = os.getpid()
        self._holder = Holder(
            verb=verb, pid=me, host=socket.gethostname(), born=born(me) or "", since=time.time(), **said
        )
        self._lock = -1

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(
                f"{self.folder} cannot be written: {error.strerror}. Make it writable, or name another folder with "
                "queue.embedded_dir."
            ) from None
        if not self._take():
            os.close(self._lock)
            raise busy(self.folder)
        self.note()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            (self.folder / STATE).unlink(missing_ok=True)
        os.close(self._lock)

    def note(self, **said: Any) -> None:
        """Say more of this process, or something else than before."""
        self._holder = self._holder.model_copy(update=said)
        with contextlib.suppress(OSError):  # a full disk: the lock is what holds
            write_private(self.folder / STATE, self._holder.model_dump_json(indent=2) + "\n")

    def _take(self) -> bool:
        for _ in range(TRIES):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(TRY_AGAIN_S)
            except OSError as error:
                if error.errno not in CANNOT_LOCK:
                    raise
                first = read(self.folder)  # a file system without locks: the state file has to do
                return first is None or not first.lives
            else:
                return True
        return False


def busy(folder: Path) -> RunBusy:
    """Names who runs there."""
    first = read(folder)
    if first is None:
        return RunBusy(f"another process has just started in {folder}: wait, or see `draftfleet up --status`.")
    where = "" if folder == Path(DEFAULT).absolute() else f" --set queue.embedded_dir={folder}"
    return RunBusy(
        f"{first.named}, already runs in {folder}; its logs are in {first.logs}. Look at it with `draftfleet logs -f"
        f"{where}`, stop it with `draftfleet down{where}`, or use another folder."
    )


def find(folder: str | Path) -> tuple[Holder | None, bool]:
    """What the state file says, None where there is none; and whether somebody runs there."""
    path = Path(folder).absolute()
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # nobody ever ran there, or it was on another machine
        return read(path), False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return read(path), True
    except OSError:
        first = read(path)
        return first, first is not None and first.lives
    finally:
        os.close(lock)
    return read(path), False


def forget(folder: str | Path) -> None:
    """Remove what a process that is no more has left. To be called where `find` found nobody."""
    (Path(folder) / STATE).unlink(missing_ok=True)


def read(folder: Path) -> Holder | None:
    try:
        return Holder.model_validate_json((folder / STATE).read_bytes())
    except (OSError, ValidationError):
        return None


def born(pid: int) -> str | None:
    """When the process began, in a form that no later clock change touches; None if it is not there."""
    try:
        if sys.platform != "linux":
            return str(psutil.Process(pid).create_time())
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state == "Z":  # it has ended, and its parent has not asked how
            return None
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {fields[18]}"
    except (OSError, psutil.Error):
        return None
