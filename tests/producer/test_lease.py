"""One producer per run: the second is told who is first, and a dead one holds nobody up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from draftfleet.embedded import Embedded
from draftfleet.errors import RunBusy
from draftfleet.queue import connect
from draftfleet.runs import Run
from draftfleet.settings import Claims, Settings
from producer.lease import Lease

Until = Callable[..., Any]
SHORT = Claims(ttl_s=0.5, renew_s=0.05)
LONG = Claims(ttl_s=600, renew_s=0.05)


@pytest.fixture
def client(settings: Settings) -> Iterator[redis.Redis]:
    with connect(settings) as client:
        yield client


def key(run: Run) -> str:
    return f"draftfleet:{run.run_id}:producer"


def test_the_second_is_refused_and_told_of_the_first(client: redis.Redis, run: Run) -> None:
    with (
        Lease(client, run, LONG),
        pytest.raises(RunBusy, match=rf"host {socket.gethostname()} pid {os.getpid()} since"),
    ):
        Lease(client, run, LONG).__enter__()


def test_it_is_free_again_after_the_exit(client: redis.Redis, run: Run) -> None:
    with Lease(client, run, LONG):
        pass

    with Lease(client, run, LONG) as lease:
        lease.check()


def test_it_outlives_its_time_to_live_while_its_holder_lives(client: redis.Redis, run: Run, until: Until) -> None:
    with Lease(client, run, SHORT) as lease:
        client.pexpire(key(run), 60)

        until(lambda: client.pttl(key(run)) > 60, what="renewal")
        lease.check()


def test_one_of_another_host_lapses(client: redis.Redis, run: Run, until: Until) -> None:
    holder = {"host": "elsewhere", "pid": 1, "process_started": 0.0, "since": 0.0, "token": ""}
    client.set(key(run), json.dumps(holder), px=300)
    with pytest.raises(RunBusy, match="host elsewhere pid 1 since 1970-01-01"):
        Lease(client, run, SHORT).__enter__()

    until(lambda: not client.exists(key(run)), what="lapse")

    with Lease(client, run, SHORT) as lease:
        lease.check()


def test_one_of_a_dead_process_of_this_host_is_taken_over_at_once(client: redis.Redis, run: Run) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    holder = {"host": socket.gethostname(), "pid": child.pid, "process_started": 0.0, "since": 0.0, "token": ""}
    client.set(key(run), json.dumps(holder), px=600_000)

    with Lease(client, run, LONG) as lease:
        lease.check()
        assert json.loads(str(client.get(key(run))))["pid"] == os.getpid()


def test_a_process_number_used_again_is_not_taken_for_the_holder(client: redis.Redis, run: Run) -> None:
    holder = {"host": socket.gethostname(), "pid": os.getppid(), "process_started": 1.0, "since": 0.0, "token": ""}
    client.set(key(run), json.dumps(holder), px=600_000)

    with Lease(client, run, LONG) as lease:
        lease.check()


def test_a_holder_whose_first_answer_was_lost_is_not_refused_by_itself(redis_server: Embedded, run: Run) -> None:
    class Repeating(redis.Redis):
        """Sends a command again, as redis-py does where the connection breaks before the answer."""

        def eval(self, *arguments: Any) -> Any:
            super().eval(*arguments)
            return super().eval(*arguments)

    with Repeating.from_url(redis_server.url, decode_responses=True) as client, Lease(client, run, LONG) as lease:
        lease.check()


def test_a_redis_that_forgot_it_is_told_again(client: redis.Redis, run: Run, until: Until) -> None:
    with Lease(client, run, LONG) as lease:
        client.flushall()

        until(lambda: client.exists(key(run)), what="the lease is set again")
        lease.check()


def test_a_holder_that_was_replaced_learns_it_and_leaves_the_other_alone(
    client: redis.Redis, run: Run, until: Until
) -> None:
    holder = json.dumps({"host": "elsewhere", "pid": 1, "process_started": 0.0, "since": 0.0, "token": ""})

    def is_lost() -> bool:
        try:
            lease.check()
        except RunBusy as error:
            return "host elsewhere" in str(error)
        return False

    with Lease(client, run, LONG) as lease:
        client.set(key(run), holder)
        until(is_lost, what="the loss is noticed")

    assert client.get(key(run)) == holder
