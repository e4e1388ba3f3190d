"""All of it on one machine: embedded Redis, Flower, one worker, one trainer, as children of one process.

The inference servers are not among them: they run already, or come later.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import redis

from draftfleet import children, live
from draftfleet.embedded import Embedded
from draftfleet.errors import DraftfleetError, QueueError
from draftfleet.news import News
from draftfleet.ports import accepts, free_port, is_free
from draftfleet.queue import connect
from draftfleet.settings import Settings, environment

FLOWER_READY_S = 20.0


class ChildEnded(DraftfleetError):
    """A process that should run on has ended."""


class Stack:
    """The processes as a context manager. On exit they drain and stop; if this process dies, they die with it."""

    def __init__(self, settings: Settings, logs: Path) -> None:
        self.logs = logs
        self.settings = settings
        self.flower_url = ""
        self.flower_login = ""
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._redis: redis.Redis | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            if self.settings.queue.url is None:
                server = starting.enter_context(Embedded(self.settings.queue.embedded_dir))
                self.settings = _with(self.settings, "queue", url=server.url)
            self._start_flower(starting)
            if self.settings.worker.servers:
                self._start("work", starting, grace_s=self.settings.worker.longest_stop_s)
            self._start("trainer", starting, grace_s=60)
            self._exit = starting.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():  # all drain at the same time
            child.terminate()
        self._exit.close()

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def reports(self) -> list[live.WorkerReport]:
        """What the workers say of themselves; nothing while Redis is away."""
        try:
            self._redis = self._redis or connect(self.settings)
            return live.read(self._redis)
        except (QueueError, redis.RedisError):
            return []

    def check(self) -> None:
        """Raises ChildEnded, with the end of its log, if one of them has ended."""
        for name, child in self._children.items():
            if (code := child.poll()) is not None:
                log = self.logs / f"{name}.log"
                raise ChildEnded(
                    f"`draftfleet {name}` ended with code {code}; its log ({log}) says:\n{children.last_lines(log)}"
                )

    def _start_flower(self, starting: ExitStack) -> None:
        knobs = self.settings.flower
        port = knobs.port if knobs.port and is_free(knobs.address, knobs.port) else free_port(knobs.address)
        password = knobs.password.get_secret_value() if knobs.password else secrets.token_urlsafe(12)
        self.settings = _with(self.settings, "flower", port=port, password=password)
        self.flower_url = f"http://{knobs.address}:{port}/"
        self.flower_login = knobs.user if knobs.password else f"{knobs.user}:{password}"
        self._start("flower", starting, grace_s=5)
        self._wait_for_flower(knobs.address, port)

    def _wait_for_flower(self, address: str, port: int) -> None:
        """Flower shows only the tasks that it saw begin, so it listens before anybody works."""
        deadline = time.monotonic() + FLOWER_READY_S
        while not accepts(address, port) and time.monotonic() < deadline:
            self.check()
            time.sleep(0.05)

    def _start(self, verb: str, starting: ExitStack, *, grace_s: float) -> None:
        argv = [sys.executable, "-m", "draftfleet", verb]
        log = (self.logs / f"{verb}.log").absolute()
        settings = _with(self.settings, "logs", file=str(log))  # which rotates it, what is only printed included
        child = children.spawn(argv, log=log, env=environment(settings))
        self._children[verb] = child
        starting.callback(children.stop, child, grace_s=grace_s)


def up(settings: Settings) -> int:
    """Run the stack until a signal. Returns an exit code; raises ChildEnded if a part ends by itself."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    with Stack(settings, Path(settings.queue.embedded_dir) / "logs") as stack:
        print(f"Flower  {stack.flower_url}  login {stack.flower_login}", file=sys.stderr)
        print(f"Logs    {stack.logs}/", file=sys.stderr)
        servers = ", ".join(settings.worker.servers) or "none named: no worker was started (--servers URL,...)"
        print(f"Servers {servers}", file=sys.stderr)
        print("Ctrl-C drains and stops everything.", file=sys.stderr)
        print("Next    draftfleet produce DATA, draftfleet status --watch", file=sys.stderr)
        news = News()
        while not stop.wait(1):
            stack.check()
            for line in news.of(stack.reports()):
                print(time.strftime("%H:%M:%S"), line, file=sys.stderr)
        print("draining: work in flight is finished or put aside", file=sys.stderr)
    return 0


def _with(settings: Settings, section: str, **values: object) -> Settings:
    """The settings with some knobs of a section replaced, checked again."""
    old = getattr(settings, section)
    fields = {name: getattr(old, name) for name in type(old).model_fields} | values
    return settings.model_copy(update={section: type(old).model_validate(fields)})
