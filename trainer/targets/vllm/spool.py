"""The folder through which hidden states come: what lies in it is bounded, ours by name, and deleted once it is read.

A server names the file of a request after the request, and the request is named by us. So what a training left behind
when it was killed is known by its name, and nothing else is ever touched.

    cmpl-draftfleet-5b1c9f0a2d3e-0-66a045-4711-7f3a90-00000012-0-8d2f1a3b.safetensors    and .lock beside it
                    the drafter  | node   process     number
                                 rank            start
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil

STALE_S = 86_400.0
"""Files of anybody's training that are older than a day have no reader any more."""

_OURS = re.compile(
    r"(?P<start>draftfleet-(?P<mark>[0-9a-f]{12})-(?P<rank>\d+)-(?P<node>[0-9a-f]{6})-(?P<process>\d+)-[0-9a-f]{6}-)\d{8}"
)


class Room:
    """What of the spool is spoken for: taken before states are asked for, given back when their file is gone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._is_open = True
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> bool:
        """Wait until there is room. False once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_open or self._taken_bytes + num_bytes <= self._limit_bytes)
            if self._is_open:
                self._taken_bytes += num_bytes
            return self._is_open

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._taken_bytes -= num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits for room any more."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()


class Spool:
    """`mark` tells the files of one drafter from those of others, and `rank` those of its processes.

    `limit_bytes` is this process' share of the folder.
    """

    def __init__(self, folder: Path, limit_bytes: int, *, mark: str, rank: int = 0, size: int = 1) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._mark, self._rank, self._size = mark, rank, size
        self._node = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
        self._start = f"draftfleet-{mark}-{rank}-{self._node}-{os.getpid()}-{secrets.token_hex(3)}-"
        self._numbers = count()

    def new_request(self) -> str:
        """A name that no other request has. Each try has one of its own: its answer may come after the next one's."""
        return f"{self._start}{next(self._numbers):08d}"

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def find(self, said: str) -> Path:
        """The file that a server names, here. Its own path to the folder may be another: in a container, say."""
        return self.folder / Path(said).name

    def remove(self, file: Path) -> None:
        for path in (file, lock_of(file)):
            with suppress(FileNotFoundError):
                path.unlink()

    def remove_requests(self, requests: Collection[str]) -> None:
        """The files of these requests, if they have come."""
        for file, request in self._ours():
            if request[0] in requests and _let_go(file):
                self.remove(file)

    def sweep(self) -> int:
        """Remove the files that this spool asked for; those of ended processes of this drafter; and old ones.

        A file that a server is still writing stays. Returns how many were removed.
        """
        removed = 0
        for file, request in self._ours():
            if self._is_forgotten(file, request) and _let_go(file):
                self.remove(file)
                removed += 1
        return removed

    def _ours(self) -> Iterator[tuple[Path, re.Match[str]]]:
        """Files of any training, also those of which only the lock is left."""
        for name in sorted({entry.name.removesuffix(".lock") for entry in os.scandir(self.folder)}):
            if request := _OURS.search(name):
                yield self.folder / name, request

    def _is_forgotten(self, file: Path, request: re.Match[str]) -> bool:
        if request["mark"] != self._mark:
            return _age_s(file) > STALE_S
        if request["start"] == self._start:
            return True
        if request["node"] == self._node and psutil.pid_exists(int(request["process"])):
            return False  # a check of the same drafter, say, while it is trained
        rank = int(request["rank"])
        return rank == self._rank or (self._rank == 0 and rank >= self._size)


def lock_of(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


def is_whole(file: Path) -> bool:
    """Whether the server has let go of the file: it holds the lock while it writes. Raises FileNotFoundError."""
    with lock_of(file).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _let_go(file: Path) -> bool:
    try:
        return is_whole(file)
    except FileNotFoundError:
        return True


def _age_s(file: Path) -> float:
    for path in (file, lock_of(file)):
        with suppress(FileNotFoundError):
            return time.time() - path.stat().st_mtime
    return 0.0
