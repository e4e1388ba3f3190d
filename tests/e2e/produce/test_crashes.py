"""A producer, a disk, a file or a Redis that fails in mid-run: the next pass completes the run, nothing is doubled."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import redis

from draftfleet.accounting import Accountant
from draftfleet.embedded import Embedded
from draftfleet.errors import DataError, QueueError, StorageUnwritable
from draftfleet.queue import connect
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


def test_a_file_that_breaks_off_leaves_the_run_open_and_the_whole_file_completes_it(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    questions: Questions,
    contents: Contents,
    texts: Texts,
    queued: Queued,
) -> None:
    lines = questions(3000)
    data = tmp_path / "data.jsonl.gz"
    whole = gzip.compress("".join(lines).encode())
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot be read after line \d+"):
        produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    assert run.sealed() is None
    assert 0 < len(run.batches()) < 375
    assert sorted(queued(client)) == run.batches()

    data.write_bytes(whole)
    produce(configure(data), progress=False)

    assert contents(run) == texts(lines)
    assert Accountant(run).account().expected == 3000


def test_a_storage_that_gets_full_is_told_and_the_next_producer_completes_the_run(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    questions: Questions,
    write: Write,
    contents: Contents,
    texts: Texts,
    queued: Queued,
) -> None:
    lines = questions(200)
    data = write(tmp_path / "data.jsonl", lines)
    sync = os.fsync

    def sync_while_there_is_room(file: int) -> None:
        if len(list(storage.list("run/prompts"))) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", sync_while_there_is_room)
        with pytest.raises(StorageUnwritable, match="No space left on device"):
            produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    assert run.sealed() is None

    report = produce(configure(data), progress=False)

    assert (report.already > 0, report.already + report.new) == (True, 200)
    assert contents(run) == texts(lines)
    assert set(queued(client)) == set(run.batches())


def test_a_producer_killed_in_mid_run_loses_and_doubles_nothing(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    until: Until,
    questions: Questions,
    write: Write,
    contents: Contents,
    texts: Texts,
    queued: Queued,
    command: Command,
) -> None:
    lines = questions(400)
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    child = subprocess.Popen(command(pipe))
    with pipe.open("w") as file:
        file.writelines(lines[:203])
        file.flush()
        until(lambda: any(storage.list("run/prompts")) and len(queued(client)) >= 5, what="batches of the child")
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    run = Run.open(storage, "run")
    assert run.sealed() is None
    assert 0 < contents(run).total() < 204

    report = produce(configure(write(tmp_path / "data.jsonl", lines)), progress=False)

    assert contents(run) == texts(lines)
    assert report.new + report.already == report.run_prompts == 400
    assert set(queued(client)) == set(run.batches())
    assert Accountant(run).account().expected == 400


def test_a_producer_killed_again_and_again_at_full_speed_loses_and_doubles_nothing(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    until: Until,
    questions: Questions,
    write: Write,
    contents: Contents,
    texts: Texts,
    queued: Queued,
    command: Command,
    in_thread: InThread,
) -> None:
    lines = questions(6000)
    for least in (1, 150, 400):
        pipe = tmp_path / f"pipe-{least}.jsonl"  # never closed, so that no pass can come to its end
        os.mkfifo(pipe)
        child = subprocess.Popen(command(pipe))
        killed = threading.Event()
        feeding = in_thread(lambda pipe=pipe, killed=killed: feed(pipe, lines, killed))
        until(lambda least=least: len(list(storage.list("run/prompts"))) >= least, what=f"{least} shards")
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        killed.set()
        feeding.result(60)
    run = Run.open(storage, "run")
    assert run.sealed() is None

    report = produce(configure(write(tmp_path / "data.jsonl", lines)), progress=False)

    assert contents(run) == texts(lines)
    assert report.new + report.already == report.run_prompts == 6000
    assert set(queued(client)) == set(run.batches())
    assert Accountant(run).account().expected == 6000


def feed(pipe: Path, lines: list[str], killed: threading.Event) -> None:
    with contextlib.suppress(BrokenPipeError), pipe.open("w") as file:
        file.writelines(lines)
        file.flush()
        killed.wait(120)


def test_batches_that_a_crash_left_unpublished_are_published_by_the_next_producer(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    questions: Questions,
    write: Write,
    queued: Queued,
) -> None:
    data = write(tmp_path / "data.jsonl", questions(50))
    produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    client.flushall()  # as if it had died between the shards and the references

    produce(configure(data), progress=False)

    assert sorted(queued(client)) == run.batches()


@pytest.mark.parametrize("returns", [True, False])
def test_a_redis_that_goes_away_in_mid_run_is_waited_for_and_costs_nothing(
    configure: Configure,
    redis_server: Embedded,
    storage: FileStorage,
    tmp_path: Path,
    until: Until,
    caplog: pytest.LogCaptureFixture,
    returns: bool,
    in_thread: InThread,
    questions: Questions,
    write: Write,
    contents: Contents,
    texts: Texts,
    queued: Queued,
) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    lines = questions(60)
    outcome = in_thread(lambda: produce(configure(pipe, claims__ttl_s=60 if returns else 1), progress=False))
    with pipe.open("w") as file:
        file.writelines(lines[:20])
        file.flush()
        until(lambda: any(storage.list("run/prompts")), what="the first shard")
        redis_server.stop()
        file.writelines(lines[20:])
    until(lambda: "publishing failed" in caplog.text, what="a publish that failed")

    if returns:
        redis_server.start()
        assert outcome.result(120).new == 60
    else:
        with pytest.raises(QueueError, match="produce again and it goes on"):
            outcome.result(120)
        redis_server.start()
        produce(configure(write(tmp_path / "data.jsonl", lines)), progress=False)

    run = Run.open(storage, "run")
    assert contents(run) == texts(lines)
    with connect(configure(pipe)) as client:
        assert set(queued(client)) == set(run.batches())
