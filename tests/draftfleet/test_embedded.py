"""The embedded Valkey: private, durable, found by other commands, gone with its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from draftfleet import embedded
from draftfleet.connection import address
from draftfleet.embedded import Embedded
from draftfleet.errors import QueueError, RunBusy
from draftfleet.queue import connect
from draftfleet.settings import load

Until = Callable[..., Any]


def test_it_needs_its_password_and_keeps_it_to_this_user(redis_server: Embedded) -> None:
    port = int(redis_server.url.rpartition(":")[2].partition("/")[0])

    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port).ping()

    assert stat.S_IMODE((redis_server.folder / embedded.ADDRESS).stat().st_mode) == 0o600
    assert redis_server.process is not None
    assert redis_server.url.split(":")[2].split("@")[0] not in " ".join(
        psutil.Process(redis_server.process.pid).cmdline()
    )


def test_other_commands_find_it_through_its_folder(redis_server: Embedded) -> None:
    settings = load(flags={"queue.embedded_dir": str(redis_server.folder)})

    assert address(settings) == redis_server.url
    assert connect(settings).ping()


def test_what_was_queued_survives_a_kill_and_comes_back_at_the_same_address(tmp_path: Path, until: Until) -> None:
    with Embedded(tmp_path) as first:
        client = redis.Redis.from_url(first.url)
        client.rpush("list", *range(1000))
        until(lambda: client.info("persistence")["aof_pending_bio_fsync"] == 0)
        client.waitaof(1, 0, 5000)
        assert first.process is not None
        first.process.kill()
        first.process.wait()

        with Embedded(tmp_path) as second:
            assert second.url == first.url
            assert redis.Redis.from_url(second.url).llen("list") == 1000


def test_a_second_one_in_the_same_folder_is_refused(redis_server: Embedded) -> None:
    with pytest.raises(RunBusy, match="already runs"):
        Embedded(redis_server.folder).start()


def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path, until: Until) -> None:
    script = (
        "import sys, time\nfrom draftfleet.embedded import Embedded\n"
        f"with Embedded({str(tmp_path)!r}) as server:\n    print(server.process.pid, flush=True)\n    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())

    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_no_redis_at_all_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match="draftfleet up"):
        connect(load(flags={"queue.embedded_dir": str(tmp_path / "nothing")}))


def test_a_redis_that_is_away_is_named_without_its_password() -> None:
    with pytest.raises(QueueError) as error:
        connect(load(flags={"queue.url": "redis://:secret-word@127.0.0.1:1/0"}))

    assert "127.0.0.1:1" in str(error.value)
    assert "secret-word" not in str(error.value)


def test_a_wrong_password_is_told_apart_from_an_absent_server(redis_server: Embedded) -> None:
    url = redis_server.url.replace(redis_server.url.split(":")[2].split("@")[0], "wrong")

    with pytest.raises(QueueError, match="refused the login"):
        connect(load(flags={"queue.url": url}))
