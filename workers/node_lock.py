"""One process per server and node: a second `draftfleet work` for the same server would fill its slots twice.

The lock is an flock of the kernel on a file per server address. It goes with its process, however that ends, so a file
left behind is no lock; what the file says (pid, start) is only for the message.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from draftfleet import runtime
from draftfleet.errors import RunBusy


class NodeLock:
    """Locks on the addresses of this process' servers. A context manager: all are free after it."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or runtime.folder()
        self._held: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep([])

    def take(self, url: str) -> None:
        """Raises RunBusy, naming the process that has it."""
        if url in self._held:
            return
        runtime.prepare(self._folder)
        path = self._folder / f"server-{hashlib.sha256(url.encode()).hexdigest()[:16]}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0)
            os.close(descriptor)
            raise RunBusy(
                f"server {url} already has a worker on this node: {_who(holder)}. One process per node owns all its "
                "servers: stop that one, or give both lists of servers to one `draftfleet work`."
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "started_at": time.time(), "url": url}).encode(), 0)
        self._held[url] = descriptor

    def keep(self, urls: Iterable[str]) -> None:
        """Give up the locks on all other addresses."""
        for url in self._held.keys() - set(urls):
            os.close(self._held.pop(url))


def _who(raw: bytes) -> str:
    try:
        holder = json.loads(raw)
        started = datetime.fromtimestamp(holder["started_at"]).strftime("%Y-%m-%d %H:%M:%S")
        return f"pid {holder['pid']}, started {started}"
    except (ValueError, KeyError, TypeError):  # it has locked the file and not yet written into it
        return "another process, just started"
