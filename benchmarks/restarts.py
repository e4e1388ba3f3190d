"""What two kill -9 of the client cost: the worker beside a plain refill client that resumes by key.

    python benchmarks/restarts.py
    python benchmarks/restarts.py --rows 10000 --time-scale 10

The servers are those of efficiency.py. The client is killed when 30 % and when 60 % of the rows are answered, and is
started again at once. Wasted are the tokens that the servers made and nobody kept. What cannot be saved are the tokens
of the requests in flight at the two kills, of the rows finished since the last checkpoint, and of the canaries of three
starts: that is the bound.
All times of the worker are divided by the time scale too.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from parts import plain_clients
from parts.model_servers import MODEL, NUM_SERVERS, SLOTS, TOKENS_PER_S, Servers, prompts

from draftfleet.accounting import Accountant
from draftfleet.embedded import Embedded
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing.workers import WorkerProcess, enqueue
from workers import canary

KILLED_AT = (0.3, 0.6)
SCALED = (
    "worker.checkpoint_interval_s",
    "claims.ttl_s",
    "claims.renew_s",
    "claims.sweep_s",
    "claims.reconcile_s",
    "claims.grace_s",
)
"""Knobs of the worker that are times of the modelled world."""

Kept = list[tuple[str, int]]
"""Row key and tokens of each sample."""


@dataclass(frozen=True, slots=True)
class Figure:
    client: str
    rows: int
    lost: int
    doubled: int
    tokens_kept: int
    tokens_wasted: int
    in_flight_at_kills: int
    bound: int
    seconds: float


class Killer:
    """Knows when it is time, and what was in flight then."""

    def __init__(self, servers: Servers, num_rows: int) -> None:
        self._servers = servers
        self._num_rows = num_rows
        self.in_flight = 0

    def wait(self, share: float) -> None:
        """Until so many rows are answered; then count the tokens that were made for requests still at work."""
        while (now := self._servers.counters()).answered < share * self._num_rows:
            time.sleep(0.05)
        self.in_flight += now.tokens_made - now.tokens_answered - self.in_flight


def _fleet(folder: Path, urls: list[str], asked: list[Prompt], killer: Killer, time_scale: float) -> Kept:
    with Embedded(folder / "redis") as redis_server:
        storage = FileStorage(folder / "storage")
        flags = {
            "queue.url": redis_server.url,
            "storage.url": storage.url,
            "target.model": MODEL,
            "worker.servers": urls,
            "worker.concurrency": SLOTS,
            **{name: _knob(name) / time_scale for name in SCALED},
        }
        settings = load(flags=flags)
        run = Run.create(storage, "bench", {"target.model": MODEL, "sampling.max_tokens": 8192}, {})
        names = enqueue(settings, run, asked, batch_size=settings.producer.batch_size)
        for number, share in enumerate((*KILLED_AT, None)):
            with WorkerProcess(settings, folder / f"worker-{number}.log") as worker:
                if share is None:
                    _until(lambda: len(run.done()) == len(names))
                else:
                    killer.wait(share)
                    worker.send(signal.SIGKILL)
                    worker.wait()
        account = Accountant(run).account()
        assert account.holds, account
        assert account.failed == account.pending == 0, account
        return [(sample.row_key, sample.completion_tokens) for name in names for sample in run.read_samples(name)]


def _refill(folder: Path, urls: list[str], asked: list[Prompt], killer: Killer, time_scale: float) -> Kept:
    rows = [{"key": prompt.row_key, "messages": prompt.messages} for prompt in asked]
    out = folder / "answers.jsonl"
    for share in (*KILLED_AT, None):
        child = plain_clients.start("refill", model=MODEL, urls=urls, rows=rows, slots=SLOTS, out=out)
        if share is not None:
            killer.wait(share)
            child.kill()
        child.wait()
    return [(answer["key"], answer["tokens"]) for answer in plain_clients.answers(out)]


def measure(client: str, num_rows: int, time_scale: float) -> Figure:
    servers, asked = Servers("equal", time_scale, num_rows), prompts(num_rows)
    killer = Killer(servers, num_rows)
    with tempfile.TemporaryDirectory() as folder, servers.running() as urls:
        ask = _fleet if client == "draftfleet" else _refill
        started = time.monotonic()
        kept = ask(Path(folder), urls, asked, killer, time_scale)
        seconds = time.monotonic() - started
        made = servers.counters().tokens_made
    times, tokens = Counter(key for key, _ in kept), sum(dict(kept).values())
    return Figure(
        client=client,
        rows=num_rows,
        lost=sum(prompt.row_key not in times for prompt in asked),
        doubled=sum(count > 1 for count in times.values()),
        tokens_kept=tokens,
        tokens_wasted=made - tokens,
        in_flight_at_kills=killer.in_flight,
        bound=killer.in_flight + _unsaved_tokens() + _canary_tokens(),
        seconds=seconds,
    )


def _unsaved_tokens() -> int:
    """What the servers make between two checkpoints, once for each kill."""
    return int(len(KILLED_AT) * _knob("worker.checkpoint_interval_s") * NUM_SERVERS * SLOTS * TOKENS_PER_S)


def _canary_tokens() -> int:
    return (len(KILLED_AT) + 1) * NUM_SERVERS * canary.TOKENS


def _knob(path: str) -> float:
    section, _, name = path.partition(".")
    return float(getattr(getattr(load(), section), name))


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 1800
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("took more than half an hour")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000)
    parser.add_argument("--time-scale", type=float, default=3)
    knobs = parser.parse_args()
    figures = [asdict(measure(client, knobs.rows, knobs.time_scale)) for client in ("draftfleet", "refill")]
    print("| " + " | ".join(figures[0]) + " |\n" + "|---" * len(figures[0]) + "|")
    for figure in figures:
        cells = (f"{value:,.0f}" if isinstance(value, float) else str(value) for value in figure.values())
        print("| " + " | ".join(cells) + " |")
    print("\n" + json.dumps(figures))
    wrong = [one for one in figures if one["lost"] or one["doubled"] or one["tokens_wasted"] > one["bound"]]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
