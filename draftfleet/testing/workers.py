"""A real `draftfleet work` as a child process, for tests that kill, freeze and drain it; and work for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from draftfleet import children
from draftfleet.names import batch_id, is_again
from draftfleet.queue import connect, make_app, publish
from draftfleet.reconcile import model_of
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment


def changed(settings: Settings, **knobs: Any) -> Settings:
    """Copy with other knobs; `worker__drain_s=5` is worker.drain_s. For tests only: nothing is checked."""
    for name, value in knobs.items():
        section, _, key = name.partition("__")
        settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update={key: value})})
    return settings


def enqueue(settings: Settings, run: Run, prompts: Sequence[Prompt], *, batch_size: int = 8) -> list[str]:
    """Do what a producer does with these prompts. Returns the names of the batches."""
    first = sum(not is_again(batch) for batch in run.batches())
    batches = [list(prompts[start : start + batch_size]) for start in range(0, len(prompts), batch_size)]
    names = [batch_id("train", first + number) for number in range(len(batches))]
    for name, batch in zip(names, batches, strict=True):
        run.write_prompts(name, batch)
    before = run.sealed() or {"prompts": 0}
    run.seal({"prompts": before["prompts"] + len(prompts)})
    publish(make_app(settings), connect(settings), run, model_of(run), names)
    return names


class WorkerProcess:
    """A context manager: killed on exit, if it still runs. Its output is in `log`.

    `wrapper` is put before the command, as in `["nice"]`; `config` is a settings file, which SIGHUP reads again.
    """

    def __init__(
        self, settings: Settings, log: Path, *, wrapper: Sequence[str] = (), config: Path | None = None
    ) -> None:
        self.log = log
        self._settings = settings
        self._command = [*wrapper, sys.executable, "-m", "draftfleet", "work"]
        if config is not None:
            self._command += ["--config", str(config)]
        self._config = config
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # With a file, the file alone decides: the environment would win over what SIGHUP reads.
        env = environment(self._settings) if self._config is None else None
        self._child = children.spawn(self._command, log=self.log, env=env)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_running:
            self.send(signal.SIGKILL)
            self.wait()

    @property
    def child(self) -> subprocess.Popen[bytes]:
        assert self._child is not None, "not started"
        return self._child

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_running(self) -> bool:
        return self.child.poll() is None

    def send(self, signum: signal.Signals) -> None:
        self.child.send_signal(signum)

    def wait(self, timeout_s: float = 30) -> int:
        """Its exit code."""
        return self.child.wait(timeout_s)

    def said(self, text: str) -> list[str]:
        """The lines of its log that contain a text."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]
