"""`draftfleet up`: everything on one machine as one command, and nothing left of it afterwards."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from draftfleet.accounting import Accountant
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.up import hold
from draftfleet.up.down import standing

Until = Callable[..., Any]


def draftfleet(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "draftfleet", *arguments], text=True, **options)


def fetch(url: str, login: str | None) -> tuple[int, str]:
    request = urllib.request.Request(url)
    if login:
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_up_serves_a_run_tells_of_its_servers_shows_flower_and_leaves_no_process(tmp_path: Path, until: Until) -> None:
    storage = FileStorage(tmp_path / "storage")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(12)))
    log = tmp_path / "up.log"
    with FakeServer(model="tiny", ready=False) as server, log.open("w") as output:
        common = ["--model", "tiny", "--storage", storage.url]
        up = draftfleet("up", "--servers", server.url, *common, "--set", "worker.probe_interval_s=0.2", stderr=output)
        try:
            until(lambda: f"server {server.url} is waiting" in log.read_text(), what="a word on the server")
            children = psutil.Process(up.pid).children(recursive=True)
            server.change(ready=True)
            until(lambda: f"server {server.url} is ready" in log.read_text(), what="a word on the server")
            made = draftfleet("produce", str(prompts), "--run", "first", *common, stdout=subprocess.PIPE)
            assert json.loads(made.communicate(timeout=60)[0])["prompts"] == 12
            accountant = Accountant(Run.open(storage, "first"))
            until(lambda: accountant.account().is_complete, what="all rows")
            found = re.search(r"Flower +(\S+) +login (\S+)", log.read_text())
            assert found
            url, login = found.groups()
            assert fetch(url + "api/workers", None)[0] == 401
            assert fetch(url + "api/workers", "draftfleet:wrong")[0] == 401
            workers = until(
                lambda: json.loads(fetch(url + "api/workers?refresh=1", login)[1]), what="workers in Flower"
            )
            tasks = json.loads(fetch(url + "api/tasks", login)[1])
        finally:
            up.send_signal(signal.SIGTERM)
            code = up.wait(60)

    assert code == 0
    assert any(name.startswith("worker-") for name in workers)
    assert {task["name"] for task in tasks.values()} == {"draftfleet.generate"}
    assert all("first train-" in task["args"] or "first heldout-" in task["args"] for task in tasks.values())
    account = accountant.account()
    assert (account.ok + account.truncated, account.failed, account.holds) == (12, 0, True)
    assert len(children) >= 4
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


def call(*arguments: str, code: int = 0) -> tuple[str, str]:
    """What it says on standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "draftfleet", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_detached_it_returns_when_all_answer_outlives_its_terminal_and_goes_down_with_its_work_put_aside(
    tmp_path: Path, until: Until
) -> None:
    storage = FileStorage(tmp_path / "storage")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(12)))
    with FakeServer(model="tiny", ready=False) as server:
        common = ["--model", "tiny", "--storage", storage.url]
        _, said = call("up", "--detach", "--servers", server.url, *common, "--set", "worker.probe_interval_s=0.2")
        try:
            holder, runs = hold.find(".draftfleet")
            assert holder is not None
            up = psutil.Process(holder.pid)
            assert (runs, holder.state, set(holder.parts)) == (True, "ready", {"flower", "work", "trainer"})
            assert (up.terminal(), os.getsid(up.pid)) == (None, up.pid)
            up.send_signal(signal.SIGHUP)
            found = re.search(r"Flower +(\S+) +login (\S+)", said)
            assert found
            assert fetch(found[1] + "api/workers", found[2])[0] == 200
            _, refused = call("up", "--servers", server.url, code=4)
            assert f"pid {up.pid} on " in refused
            assert json.loads(call("up", "--status")[0])["servers"] == {server.url: "waiting"}
            server.fault("hang", after=1)  # the canary is answered
            server.change(ready=True)
            call("produce", str(prompts), *common)
            until(lambda: (standing(load()) or {}).get("rows_in_flight"), what="requests in flight")
            lines, _ = call("logs", "-n", "500")
            assert {line.split()[0] for line in lines.splitlines()} >= {"up", "work", "trainer", "valkey"}
            assert f"server {server.url} is ready" in lines
            assert found[2].partition(":")[2] not in lines
            assert all(line.startswith("work ") for line in call("logs", "work")[0].splitlines())
            family = [up, *up.children(recursive=True)]
            stopped = json.loads(call("down", "--now")[0])
        except BaseException:
            call("down", "--now")
            raise

    assert f"pid {up.pid}" in stopped["stopped"]
    assert (stopped["how"], stopped["rows_in_flight"] > 0) == ("put aside what was in flight", True)
    assert [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert call("up", "--status", code=1)[1].startswith("nothing runs in ")


def test_detached_it_tells_with_the_end_of_its_log_why_a_part_did_not_start(tmp_path: Path) -> None:
    (tmp_path / "storage").write_text("a file")

    _, said = call("up", "--detach", "--storage", str(tmp_path / "storage"), code=1)

    assert "did not start: it ended with code" in said
    assert "storage" in said.partition("says:")[2]
    assert hold.find(".draftfleet")[1] is False
