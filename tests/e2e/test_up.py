"""`draftfleet up`: everything on one machine as one command, and nothing left of it afterwards."""

from __future__ import annotations

import base64
import json
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
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer

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
