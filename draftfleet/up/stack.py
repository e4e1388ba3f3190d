"""Embedded Redis, Flower, one worker, one trainer, as children of one process.

The inference servers are not among them: they run already, or come later.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis

from draftfleet import children, live
from draftfleet.embedded import Embedded
from draftfleet.errors import DraftfleetError, QueueError
from draftfleet.ports import accepts, free_port, is_free
from draftfleet.queue import connect, make_app
from draftfleet.settings import Settings, environment
from draftfleet.up import leftover
from draftfleet.up.hold import Hold

Part = Literal["flower", "work", "trainer"]
ALL: tuple[Part, ...] = ("flower", "work", "trainer")

FLOWER_READY_S = 20.0
PING_S = 1.0
LOOKED_AT = 50
"""Lines at the end of a log in which an error is looked for."""

ERROR = "draftfleet: "
"""How the command line begins an error."""


class ChildEnded(DraftfleetError):
    """A process that should run on has ended."""


class Stack:
    """The processes as a context manager. On exit they drain and stop; if this process dies, they die with it.

    Raises RunBusy where another one runs in `queue.embedded_dir`. A worker is started only if servers are named.
    """

    def __init__(self, settings: Settings, logs: Path, *, verb: str = "up", parts: Sequence[Part] = ALL) -> None:
        self.logs = logs.absolute()
        self.settings = settings
        self.hold = Hold(
            settings.queue.embedded_dir,
            verb,
            logs=str(self.logs),
            storage=settings.storage.url,
            servers=settings.worker.servers,
        )
        self.flower_url = ""
        self.flower_login = ""
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._parts = parts
        self._are_told = False
        self._ready: set[str] = set()
        self._redis: redis.Redis | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            starting.enter_context(self.hold)
            if self.settings.queue.url is None:
                server = starting.enter_context(Embedded(self.settings.queue.embedded_dir))
                self.settings = with_knobs(self.settings, "queue", url=server.url)
                leftover.give_back(self.settings)
            if "flower" in self._parts:
                self._start_flower(starting)
            if "work" in self._parts and self.settings.worker.servers:
                self._start("work", starting, grace_s=self.settings.worker.longest_stop_s)
            if "trainer" in self._parts:
                self._start("trainer", starting, grace_s=60)
            self.hold.note(parts=self.pids(), flower_url=self.flower_url, flower_login=self.flower_login)
            self._exit = starting.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold.note(state="draining")
        self.hurry()  # all drain at the same time
        self._exit.close()

    def hurry(self) -> None:
        """Tell all parts to end. Told twice, a worker puts aside what is in flight and does not wait for it."""
        self._are_told = True
        for child in self._children.values():
            if child.poll() is None:
                child.terminate()

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def reports(self) -> list[live.WorkerReport]:
        """What the workers say of themselves; nothing while Redis is away."""
        try:
            self._redis = self._redis or connect(self.settings)
            return live.read(self._redis)
        except (QueueError, redis.RedisError):
            return []

    def waiting_for(self) -> list[str]:
        """The parts that do not answer yet. A worker does before its servers are ready: they may load for long."""
        if "flower" in self._children and accepts(self.settings.flower.address, self.settings.flower.port):
            self._ready.add("flower")
        if any(report.pid == pid for report in self.reports() if (pid := self.pids().get("work"))):
            self._ready.add("work")
        if "trainer" in self._children and "trainer" not in self._ready:
            name = f"trainer-{self._children['trainer'].pid}@{socket.gethostname()}"
            if make_app(self.settings).control.ping(destination=[name], timeout=PING_S):
                self._ready.add("trainer")
        return [name for name in self._children if name not in self._ready]

    def check(self) -> None:
        """Raises ChildEnded, with the end of its log, if one of them has ended."""
        for name, child in self._children.items():
            if (code := child.poll()) is not None:
                log = self.logs / f"{name}.log"
                raise ChildEnded(
                    f"`draftfleet {name}` ended with code {code}; its log ({log}) says:\n{_last_words(log)}"
                )

    def _start_flower(self, starting: ExitStack) -> None:
        knobs = self.settings.flower
        port = knobs.port if knobs.port and is_free(knobs.address, knobs.port) else free_port(knobs.address)
        password = knobs.password.get_secret_value() if knobs.password else secrets.token_urlsafe(12)
        self.settings = with_knobs(self.settings, "flower", port=port, password=password)
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
        log = self.logs / f"{verb}.log"
        settings = with_knobs(self.settings, "logs", file=str(log))  # which rotates it, what is only printed included
        child = children.spawn(argv, log=log, env=environment(settings))
        self._children[verb] = child
        starting.callback(self._end, child, grace_s)

    def _end(self, child: subprocess.Popen[bytes], grace_s: float) -> None:
        if not self._are_told:  # another part did not start
            self.hurry()
        children.end(child, grace_s=grace_s)


def _last_words(log: Path) -> str:
    """The error that it ended with, where it said one in our form; else its last lines."""
    lines = children.last_lines(log, count=LOOKED_AT).splitlines()
    said = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    return "\n".join(lines[said[-1] :]).removeprefix(ERROR) if said else "\n".join(lines[-15:])


def with_knobs(settings: Settings, section: str, **values: object) -> Settings:
    """The settings with some knobs of a section replaced, checked again."""
    old = getattr(settings, section)
    fields = {name: getattr(old, name) for name in type(old).model_fields} | values
    return settings.model_copy(update={section: type(old).model_validate(fields)})
