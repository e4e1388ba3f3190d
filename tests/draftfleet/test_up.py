"""Who runs in a folder, what a dead one left there, and the lines of all its logs."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet.errors import RunBusy
from draftfleet.logfile import RotatingFile
from draftfleet.settings import Settings, load
from draftfleet.up import hold, leftover
from draftfleet.up.down import down
from draftfleet.up.hold import Hold
from draftfleet.up.lines import Tail, merged

Until = Callable[..., Any]

HOLDING = (
    "import sys, time; from draftfleet.up.hold import Hold\nwith Hold(sys.argv[1], 'up'): print(flush=True); input()"
)


def of_folder(folder: Path) -> Settings:
    return load(flags={"queue.embedded_dir": str(folder), "storage.url": str(folder / "storage")})


def test_a_second_one_in_a_folder_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with Hold(tmp_path, "up", logs="the-logs"):
        with pytest.raises(RunBusy, match=rf"`draftfleet up`, pid {os.getpid()} on .*, since 20.*the-logs"):
            Hold(tmp_path, "generate").__enter__()
        holder, runs = hold.find(tmp_path)
        assert (tmp_path / hold.STATE).stat().st_mode & 0o777 == 0o600

    assert holder is not None
    assert (holder.lives, runs) == (True, True)
    assert hold.find(tmp_path) == (None, False)
    with Hold(tmp_path, "up"):
        pass


def test_what_a_killed_one_left_is_told_once_and_holds_nobody_up(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout is not None
    first.stdout.readline()
    first.kill()
    first.wait()

    told, again = down(of_folder(tmp_path), now=False), down(of_folder(tmp_path), now=False)

    assert f"pid {first.pid}" in told["stopped"]
    assert "ended without being told to" in told["stopped"]
    assert again["stopped"] == f"nothing: nothing runs in {tmp_path}"


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    with Hold(tmp_path, "up", logs="x"):
        holder = hold.read(tmp_path)
    assert holder is not None

    later = holder.model_copy(update={"born": "another boot 1"})

    assert not later.lives
    (tmp_path / hold.STATE).write_text(later.model_dump_json())
    assert "ended without being told to" in down(of_folder(tmp_path), now=True)["stopped"]


def test_only_owners_that_were_processes_of_this_machine_are_known_to_have_ended() -> None:
    host = socket.gethostname()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    assert leftover.has_ended(f"{host}-{gone.pid}-0a1b2c")
    assert leftover.has_ended(f"trainer-{gone.pid}@{host}")
    assert not leftover.has_ended(f"elsewhere-{gone.pid}-0a1b2c")
    assert not leftover.has_ended(f"trainer-{gone.pid}@elsewhere")
    assert not leftover.has_ended("orders")


def test_a_log_is_followed_across_rotations_without_a_line_lost(tmp_path: Path) -> None:
    path = tmp_path / "work.log"
    writer = RotatingFile(path)
    writer.maxBytes, writer.backupCount = 400, 9
    writer.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def write(numbers: range) -> None:
        for number in numbers:
            writer.emit(logging.LogRecord("x", logging.INFO, "", 0, f"number={number}", None, None))

    write(range(30))
    tail = Tail(path)
    last = tail.last(20)
    write(range(30, 33))
    few = tail.new()
    write(range(33, 70))  # several rotations between two looks
    many = tail.new()
    writer.close()

    assert path.with_name("work.log.3").exists()
    numbers = [int(line.rpartition("=")[2]) for line in [*last, *few, *many]]
    assert numbers == list(range(10, 70))
    assert tail.new() == []


def test_lines_of_several_logs_are_merged_by_time_and_a_traceback_stays_whole() -> None:
    ours = ["2026-12-01 01:00:01,500 E x: broke", "Traceback (most recent call last):", "ValueError: 7"]
    valkey = ["16:M 01 Dec 2026 01:00:01.000 * Ready", "16:M 01 Dec 2026 01:00:02.000 * Saved"]
    flower = ["[W 261201 01:00:03 inspector:1] slow"]
    as_json = ['{"time": 1, "event": "the first"}']

    said = list(merged({"work": ours, "valkey": valkey, "flower": flower, "trainer": as_json}))

    assert [name for name, _ in said] == ["trainer", "valkey", "work", "work", "work", "valkey", "flower"]
    assert [line for name, line in said if name == "work"] == ours
