"""Several nodes for real, on this machine: network namespaces, Redis in one, workers with their servers in two others.

`make nodes`, as root. One node is cut off for longer than its claims last, and healed: no row is lost or doubled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from draftfleet import children
from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.errors import QueueError
from draftfleet.queue import connect
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not shutil.which("ip"), reason="needs ip (Debian: iproute2)"),
    pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server"),
]

SLOTS, LATENCY_S, INTERVAL_S = 4, 0.5, 0.3

SHORT = {
    "claims__ttl_s": 3.0,
    "claims__renew_s": 0.5,
    "claims__sweep_s": 0.5,
    "claims__reconcile_s": 2,
    "claims__grace_s": 2,
    "worker__checkpoint_interval_s": INTERVAL_S,
    "worker__probe_interval_s": 0.2,
    "worker__concurrency": SLOTS,
}

PORT = 6379
SERVER_PORTS = iter(range(8001, 8100))
"""One per server: the node lock is the machine's, and knows nothing of namespaces."""


def ip(*args: str, check: bool = True) -> None:
    subprocess.run(["ip", *args], check=check, capture_output=not check)


class Net:
    """A namespace for Redis, one per node, and a cable from Redis to each and to this machine. Gone on exit."""

    def __init__(self, *nodes: str) -> None:
        self._mark = uuid.uuid4().hex[:5]
        self.hub = f"df-{self._mark}-redis"
        self.nodes = [f"df-{self._mark}-{node}" for node in nodes]
        self._cables: list[str] = []

    def __enter__(self) -> Net:
        try:
            for name in (self.hub, *self.nodes):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            for number, node in enumerate([None, *self.nodes]):
                self._lay(number, node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.hub, *self.nodes):  # the cables go with their ends
            ip("netns", "del", name, check=False)
        for cable in self._cables:
            ip("link", "del", cable, check=False)

    def _lay(self, number: int, node: str | None) -> None:
        """Cable `number`: the hub's end is 10.77.NUMBER.1, the other 10.77.NUMBER.2."""
        near, far = f"df{self._mark}h{number}", f"df{self._mark}n{number}"
        ip("link", "add", near, "type", "veth", "peer", "name", far)
        self._cables.append(far)
        ip("link", "set", near, "netns", self.hub)
        if node:
            ip("link", "set", far, "netns", node)
        for where, end, host in ((["-n", self.hub], near, 1), (["-n", node] if node else [], far, 2)):
            ip(*where, "addr", "add", f"10.77.{number}.{host}/24", "dev", end)
            ip(*where, "link", "set", end, "up")

    def cut(self, node: str, *, healed: bool = False) -> None:
        number = 1 + self.nodes.index(node)
        ip("-n", self.hub, "link", "set", f"df{self._mark}h{number}", "up" if healed else "down")


def inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


@pytest.fixture
def net() -> Iterator[Net]:
    with Net("a", "b") as laid:
        yield laid


def test_a_node_that_is_cut_off_for_longer_than_its_claims_and_healed_costs_no_row_and_doubles_none(
    net: Net, tmp_path: Path, until: Callable[..., Any], make_prompts: Callable[..., list[Prompt]]
) -> None:
    storage = FileStorage(tmp_path / "storage")
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.max_tokens": 64}, {})
    prompts = make_prompts(400)
    password = uuid.uuid4().hex

    def settings(number: int) -> Settings:
        flags = {"queue.url": f"redis://:{password}@10.77.{number}.1:{PORT}/0", "storage.url": storage.url}
        return changed(load(flags=flags | {"target.model": "tiny", "run": "run"}), **SHORT)

    with ExitStack() as stack:
        start_redis(stack, net.hub, password, tmp_path)
        ours = settings(0)
        until(lambda: answers(ours), what="Redis in its namespace")
        names = enqueue(ours, run, prompts, batch_size=16)
        workers = {
            node: start_node(stack, node, settings(number), tmp_path) for number, node in enumerate(net.nodes, start=1)
        }
        lost_one, other = net.nodes
        until(lambda: len(run.done()) >= 4 and all(worker.said("batch done") for worker in workers.values()))

        net.cut(lost_one)
        cut_at = time.monotonic()
        lapsed = until(lambda: batches_in(workers[other].said("claim lapsed")), what="claims that lapsed")
        # The lost node goes on with what it holds: some are found done, some are done by both.
        until(
            lambda: (
                lapsed <= set(run.done())
                and lapsed & batches_in(workers[other].said("batch taken")) <= batches_in(workers[other].said(" ok="))
            ),
            what="the batches of the lost node done, also by the other where it had begun them",
            deadline_s=120,
        )
        away_s = time.monotonic() - cut_at
        net.cut(lost_one, healed=True)

        until(lambda: run.done() == names, what="all batches", deadline_s=240)
        until(lambda: not Claims(connect(ours), run.run_id, ours.claims, "test").held(), what="no claim left")
        for worker in workers.values():
            worker.send(signal.SIGTERM)
        codes = [worker.wait(60) for worker in workers.values()]
        asked = sum(requests(node, worker) for node, worker in workers.items())

    samples = [sample for name in run.done() for sample in run.read_samples(name)]
    account = Accountant(run).account()
    regenerated = asked - len(prompts) - len(workers)  # one canary each
    print(f"cut off for {away_s:.1f} s with claims of 3 s: {regenerated} of {len(prompts)} rows were asked again")
    assert codes == [0, 0]
    assert Counter(sample.row_key for sample in samples) == Counter(prompt.row_key for prompt in prompts)
    assert (account.holds, account.pending, account.failed) == (True, 0, 0)
    # What both held between lapse and heal: the batches of the lost node, three of 16 rows by the watermark, and one
    # more that was on its way.
    assert 0 <= regenerated <= 4 * 16 + 2 * SLOTS


def batches_in(lines: list[str]) -> set[str]:
    return {name for line in lines for name in re.findall(r"(?:batch|name)=(train-\d+)", line)}


def answers(settings: Settings) -> bool:
    try:
        return bool(connect(settings))
    except QueueError:
        return False


def start_redis(stack: ExitStack, namespace: str, password: str, folder: Path) -> None:
    config = folder / "redis.conf"
    config.write_text(f"bind 0.0.0.0\nport {PORT}\nrequirepass {password}\ndir {folder}\nappendonly yes\n")
    child = children.spawn([*inside(namespace), "redis-server", str(config)], log=folder / "redis.log")
    stack.callback(children.stop, child)


def start_node(stack: ExitStack, namespace: str, settings: Settings, folder: Path) -> WorkerProcess:
    """A server and a worker in a namespace."""
    behaviour = json.dumps({"model": "tiny", "latency_s": LATENCY_S})
    port = next(SERVER_PORTS)
    command = [sys.executable, "-m", "draftfleet", "fake-server", "--port", str(port), "--json", behaviour]
    server = children.spawn([*inside(namespace), *command], log=folder / f"{namespace}-server.log")
    stack.callback(children.stop, server)
    settings = changed(settings, worker__servers=[f"http://127.0.0.1:{port}"])
    return stack.enter_context(WorkerProcess(settings, folder / f"{namespace}.log", wrapper=inside(namespace)))


def requests(namespace: str, worker: WorkerProcess) -> int:
    """How many the server of a worker got."""
    [url] = {url for line in worker.said("server ready") for url in re.findall(r"server=(\S+)", line)}
    code = f"import urllib.request as u; print(u.urlopen('{url}/fake/stats').read().decode())"
    said = subprocess.run([*inside(namespace), sys.executable, "-c", code], check=True, capture_output=True)
    return int(json.loads(said.stdout)["requests"])
