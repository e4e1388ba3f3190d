"""A long run under constant harm: 100,000 rows while workers, servers and Redis are killed, frozen and cut off.

    python benchmarks/soak.py
    python benchmarks/soak.py --rows 10000 --harms 6 --seed 7

Three workers share a run, each with a fake server of its own. At even steps of progress something is done to them, in
an order that the seed decides: kill -9 of a worker, of a server or of Redis, every connection of Redis cut, a worker
frozen for longer than its claim. What was killed is started again. One worker is never killed: its memory is measured.

At the end every row has exactly one sample. Exit code 1 if a row is lost, doubled or failed, if the accounting identity
does not hold, or if the memory of the worker grew by more than a tenth after the first third.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from draftfleet.accounting import Accountant
from draftfleet.embedded import Embedded
from draftfleet.ports import free_port
from draftfleet.queue import connect
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeProcess
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

MODEL = "fake"
BATCH_SIZE, CONCURRENCY, TOKENS, LATENCY_S = 64, 32, 24, 0.25
CLAIMS = {
    "claims.ttl_s": 10,
    "claims.renew_s": 2.5,
    "claims.sweep_s": 1,
    "claims.reconcile_s": 20,
    "claims.grace_s": 10,
}
STALL_LIMIT_S = 120
GROWTH_ALLOWED = 1.10


@dataclass(slots=True)
class Node:
    """A worker and its server, which come back under the same address and log."""

    settings: Settings
    folder: Path
    name: str
    port: int
    server: FakeProcess = field(init=False)
    worker: WorkerProcess = field(init=False)
    asked: int = 0
    tokens: int = 0
    starts: int = 0

    def start_server(self) -> None:
        self.server = FakeProcess(port=self.port, model=MODEL, latency_s=LATENCY_S, tokens=TOKENS)
        self.server.__enter__()

    def start_worker(self) -> None:
        self.starts += 1
        settings = changed(self.settings, worker__servers=[f"http://127.0.0.1:{self.port}"])
        self.worker = WorkerProcess(settings, self.folder / f"{self.name}-{self.starts}.log")
        self.worker.__enter__()

    def kill_server(self) -> None:
        self.note()
        self.server.kill()

    def kill_worker(self) -> None:
        self.worker.send(signal.SIGKILL)
        self.worker.wait()

    def note(self) -> None:
        """Keep the counters of a server that is about to go."""
        stats = self.server.stats()
        self.asked += stats["requests"]
        self.tokens += stats["tokens"]


class Soak:
    def __init__(self, folder: Path, num_rows: int, num_harms: int, seed: int) -> None:
        self._redis_server = Embedded(folder / "redis")
        self._redis_server.start()
        self._storage = FileStorage(folder / "storage")
        self._settings = load(
            flags={
                "queue.url": self._redis_server.url,
                "storage.url": self._storage.url,
                "target.model": MODEL,
                "worker.concurrency": CONCURRENCY,
                "worker.probe_interval_s": 1,
                **CLAIMS,
            }
        )
        self._run = Run.create(self._storage, "soak", {"target.model": MODEL, "sampling.max_tokens": 4096}, {})
        self._nodes = [Node(self._settings, folder, f"worker-{number}", free_port()) for number in range(3)]
        self._prompts = [_prompt(number) for number in range(num_rows)]
        self._random = random.Random(seed)
        self._harms: list[tuple[str, Callable[[], object]]] = [
            ("kill -9 of a worker", self._kill_worker),
            ("kill -9 of a server", self._kill_server),
            ("kill -9 of Redis", self._kill_redis),
            ("every connection of Redis cut", self._cut_connections),
            ("a worker frozen longer than its claim", self._freeze_worker),
        ]
        kinds = [harm for number in range(num_harms) for harm in [self._harms[number % len(self._harms)]]]
        self._random.shuffle(kinds)
        self._plan = kinds
        self._done: Counter[str] = Counter()
        self._memory: list[tuple[float, int]] = []
        self._ended = threading.Event()

    def run(self) -> dict[str, object]:
        names = enqueue(self._settings, self._run, self._prompts, batch_size=BATCH_SIZE)
        started = time.monotonic()
        for node in self._nodes:
            node.start_server()
            node.start_worker()
        threading.Thread(target=self._watch_memory, args=[len(names)], daemon=True).start()
        try:
            for number, (kind, harm) in enumerate(self._plan):
                self._wait_for_share((number + 1) / (len(self._plan) + 1), len(names))
                harm()
                self._done[kind] += 1
                print(f"{time.monotonic() - started:6.0f} s  {len(self._run.done())}/{len(names)}  {kind}", flush=True)
            self._wait_for_share(1, len(names))
            seconds = time.monotonic() - started
            for node in self._nodes:
                node.note()
        finally:
            self._ended.set()
            for node in self._nodes:
                node.worker.__exit__(None, None, None)
                node.server.kill()
            self._redis_server.stop()
        return self._figures(names, seconds)

    def _wait_for_share(self, share: float, num_batches: int) -> None:
        last, since = -1, time.monotonic()
        while (done := len(self._run.done())) < share * num_batches:
            if done != last:
                last, since = done, time.monotonic()
            if time.monotonic() - since > STALL_LIMIT_S:
                raise SystemExit(f"no batch was done for {STALL_LIMIT_S} s: the logs are in {self._nodes[0].folder}")
            time.sleep(0.2)

    def _watch_memory(self, num_batches: int) -> None:
        """Of the worker that is never killed, in a thread of its own."""
        process = psutil.Process(self._nodes[0].worker.pid)
        while not self._ended.wait(1):
            self._memory.append((len(self._run.done()) / num_batches, int(process.memory_info().rss)))

    def _kill_worker(self) -> None:
        node = self._random.choice(self._nodes[1:])
        node.kill_worker()
        node.start_worker()

    def _kill_server(self) -> None:
        node = self._random.choice(self._nodes)
        node.kill_server()
        time.sleep(2)
        node.start_server()

    def _kill_redis(self) -> None:
        assert self._redis_server.process is not None
        self._redis_server.process.kill()
        self._redis_server.process.wait()
        time.sleep(1)
        self._redis_server.start()

    def _cut_connections(self) -> None:
        client = connect(self._settings)
        for kind in ("normal", "pubsub"):
            try:
                client.client_kill_filter(_type=kind, skipme=True)
            except redis.RedisError as error:
                print(f"        CLIENT KILL {kind}: {error}")

    def _freeze_worker(self) -> None:
        node = self._random.choice(self._nodes[1:])
        node.worker.send(signal.SIGSTOP)
        time.sleep(12)
        node.worker.send(signal.SIGCONT)

    def _figures(self, names: list[str], seconds: float) -> dict[str, object]:
        keys = Counter(sample.row_key for name in self._run.done() for sample in self._run.read_samples(name))
        account = Accountant(self._run).account()
        first, last = _mean(self._memory, 0.30, 0.40), _mean(self._memory, 0.85, 1.0)
        num_rows = len(self._prompts)
        return {
            "rows": num_rows,
            "seconds": round(seconds),
            "harms": dict(self._done),
            "kills": sum(count for kind, count in self._done.items() if kind.startswith("kill")),
            "lost": sum(prompt.row_key not in keys for prompt in self._prompts),
            "doubled": sum(count > 1 for count in keys.values()),
            "failed": account.failed,
            "pending": account.pending,
            "identity_holds": account.holds,
            "batches": f"{len(names)}, {account.split} of them split",
            "requests_beyond_rows": sum(node.asked for node in self._nodes) - num_rows,
            "tokens_kept": account.tokens,
            "tokens_generated": sum(node.tokens for node in self._nodes),
            "rss_mb_at_a_third_and_at_the_end": [round(first / 2**20, 1), round(last / 2**20, 1)],
        }


def _prompt(number: int) -> Prompt:
    messages = [{"role": "user", "content": f"Question {number}?"}]
    return Prompt(prompt_id(messages, None), "train", messages)


def _mean(samples: list[tuple[float, int]], low: float, high: float) -> float:
    values = [rss for share, rss in samples if low <= share <= high]
    return sum(values) / max(len(values), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--harms", type=int, default=40, help="an equal number of each kind, in random order")
    parser.add_argument("--seed", type=int, default=1)
    knobs = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftfleet-soak-") as folder:
        figures = Soak(Path(folder), knobs.rows, knobs.harms, knobs.seed).run()
    print("\n".join(f"{name:34} {value}" for name, value in figures.items()) + "\n\n" + json.dumps(figures))
    clean = not any(figures[name] for name in ("lost", "doubled", "failed", "pending")) and figures["identity_holds"]
    first, last = figures["rss_mb_at_a_third_and_at_the_end"]  # pyright: ignore[reportGeneralTypeIssues]
    sys.exit(0 if clean and last <= first * GROWTH_ALLOWED else 1)


if __name__ == "__main__":
    main()
