"""`draftfleet status` in a real terminal: a pty of a given size, and the real command."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Self

import pytest

from draftfleet.names import batch_id
from draftfleet.queue import connect, make_app, publish
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
OTHER_SCREEN, BACK = "\x1b[?1049h", "\x1b[?1049l"
BATCH = batch_id("train", 0)


class Terminal:
    """The command in a pty. A context manager: killed on exit, if it still runs. `said` is all that came of it."""

    def __init__(self, settings: Settings, *arguments: str, columns: int = 100, lines: int = 40, **env: str) -> None:
        self._command = [sys.executable, "-m", "draftfleet", *arguments]
        inherited = {
            name: value
            for name, value in environment(settings).items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
        }
        self._env = inherited | {"TERM": "xterm-256color"} | env
        self._size = struct.pack("HHHH", lines, columns, 0, 0)
        self.said = ""

    def __enter__(self) -> Self:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, self._size)
        self._child = subprocess.Popen(
            self._command, stdin=theirs, stdout=theirs, stderr=theirs, env=self._env, start_new_session=True
        )
        os.close(theirs)
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        os.close(self._ours)

    def read_until(self, text: str, deadline_s: float = 60) -> str:
        end = time.monotonic() + deadline_s
        while text not in self.said:
            if time.monotonic() > end or not self._read():
                pytest.fail(f"{text!r} was not shown, but {self.said[-500:]!r}")
        return self.said

    def press_ctrl_c(self) -> None:
        self._child.send_signal(signal.SIGINT)

    def end(self, deadline_s: float = 60) -> int:
        """Its exit code."""
        end = time.monotonic() + deadline_s
        while self._read():
            if time.monotonic() > end:
                pytest.fail(f"it did not end, and said {self.said[-500:]!r}")
        return self._child.wait(10)

    def _read(self) -> bool:
        """False if nothing more will come."""
        if not select.select([self._ours], [], [], 0.2)[0]:
            return True
        try:
            got = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            return False
        self.said += got.decode(errors="replace")
        return bool(got)


@pytest.fixture
def waiting(settings: Settings, run: Run, make_prompts: Callable[..., list[Prompt]]) -> Run:
    """A run of three rows, of which none is answered."""
    run.write_prompts(BATCH, make_prompts(3))
    run.seal({"prompts": 3})
    publish(make_app(settings), connect(settings), run, "tiny", [BATCH])
    return run


def answer(run: Run, make_sample: Callable[..., Sample]) -> None:
    run.commit(BATCH, [make_sample(prompt) for prompt in run.read_prompts(BATCH)])


def words(text: str) -> str:
    return " ".join(COLOUR.sub("", text).split())


def test_colours_are_for_terminals_and_without_them_it_says_the_same(settings: Settings, waiting: Run) -> None:
    with Terminal(settings, "status") as coloured:
        assert coloured.end() == 0
    with Terminal(settings, "status", NO_COLOR="1") as plain:
        assert plain.end() == 0
    piped = subprocess.run(
        [sys.executable, "-m", "draftfleet", "status"],
        env=environment(settings) | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "\x1b[33m" in coloured.said
    assert not re.search(r"\x1b\[(?:3|9)[0-7]", plain.said)
    assert "\x1b" not in piped.stdout
    figures = ("0 of 3 rows (0.0%)", "rows are pending and no worker is there", "Next: start `draftfleet work")
    for said in (coloured.said, plain.said, piped.stdout):
        assert all(one in words(said) for one in figures)


def test_in_a_narrow_terminal_no_line_is_longer_than_it(settings: Settings, waiting: Run) -> None:
    with Terminal(settings, "status", columns=40) as terminal:
        assert terminal.end() == 0

    lines = COLOUR.sub("", terminal.said).splitlines()
    assert max(map(len, lines)) <= 40
    assert "expected 3, ok 0, truncated 0," in [line.strip() for line in lines]


def test_watching_ends_by_itself_when_the_run_is_done_and_leaves_the_last_state(
    settings: Settings, waiting: Run, make_sample: Callable[..., Sample]
) -> None:
    with Terminal(settings, "status", "--watch") as terminal:
        terminal.read_until("0 of 3 rows")
        answer(waiting, make_sample)
        assert terminal.end() == 0

    screen, _, after = terminal.said.partition(BACK)
    assert OTHER_SCREEN in screen
    assert "3 of 3 rows (100.0%)" in words(after)
    assert "\x1b[2J" not in screen.partition("0 of 3 rows")[2], "what is drawn is never wiped first"


def test_a_low_window_keeps_what_is_to_be_done(settings: Settings, waiting: Run) -> None:
    with Terminal(settings, "status", "--watch", lines=8) as terminal:
        shown = terminal.read_until("Next: start `draftfleet work")

    assert "make the window higher" in shown


def test_ctrl_c_ends_watching_with_130_and_without_a_traceback(settings: Settings, waiting: Run) -> None:
    with Terminal(settings, "status", "--watch") as terminal:
        terminal.read_until("0 of 3 rows")
        terminal.press_ctrl_c()
        assert terminal.end() == 130

    assert "Traceback" not in terminal.said
    assert BACK in terminal.said


def test_without_a_terminal_watching_prints_lines(
    settings: Settings, waiting: Run, make_sample: Callable[..., Sample]
) -> None:
    answer(waiting, make_sample)

    said = subprocess.run(
        [sys.executable, "-m", "draftfleet", "status", "--watch"],
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout

    assert re.fullmatch(r"\d\d:\d\d:\d\d run run: 3 of 3 rows \(100\.0%\)[^\n]*\n", said)
