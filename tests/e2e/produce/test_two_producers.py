"""One producer works on a run at a time."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import redis

from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from producer.produce import produce

Until = Callable[..., Any]
Configure = Callable[..., Settings]
InThread = Callable[[Callable[[], Any]], Future[Any]]
Questions = Callable[..., list[str]]
Write = Callable[[Path, list[str]], Path]
Contents = Callable[[Run], Counter[str]]
Texts = Callable[[list[str]], Counter[str]]
Queued = Callable[[redis.Redis], list[str]]
Command = Callable[..., list[str]]


def test_a_second_producer_is_told_of_the_first(
    configure: Configure,
    client: redis.Redis,
    tmp_path: Path,
    until: Until,
    in_thread: InThread,
    questions: Questions,
    write: Write,
    queued: Queued,
    command: Command,
) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    first = in_thread(lambda: produce(configure(pipe), progress=False))
    with pipe.open("w") as file:
        file.writelines(questions(20))
        file.flush()
        until(lambda: queued(client), what="the first producer at work")
        data = write(tmp_path / "data.jsonl", questions(5))

        second = subprocess.run(command(data), capture_output=True, text=True, check=False, timeout=120)

    assert first.result(60).new == 20
    assert second.returncode == 1
    assert f"pid {os.getpid()} since" in second.stderr
    assert "one producer per run at a time" in second.stderr


def test_two_producers_that_start_on_a_new_run_at_once_leave_one_run_with_nothing_doubled(
    storage: FileStorage,
    tmp_path: Path,
    questions: Questions,
    write: Write,
    contents: Contents,
    texts: Texts,
    command: Command,
) -> None:
    lines = questions(300)
    data = write(tmp_path / "data.jsonl", lines)
    children = [subprocess.Popen(command(data), stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for child in children:
        _, said = child.communicate(timeout=120)
        assert child.returncode == 0 or b"busy: " in said, said.decode()

    assert contents(Run.open(storage, "run")) == texts(lines)
