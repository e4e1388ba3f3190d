"""How full the servers are kept: the fleet beside plain clients, on the shipped model of a server.

    python benchmarks/efficiency.py                            every case, 35 minutes
    python benchmarks/efficiency.py --case equal --client draftfleet --client refill

7 fake servers with 48 slots each, answers of log-normal length (mean 1,818 tokens, sigma 0.9, at most 8,192), 20,000
rows, times divided by --time-scale. Capacity is what the servers that are up make with all their slots taken, summed
over the time from the first request to the last answer; efficiency is the share of it that became kept tokens. The
first request of the fleet is that of its canary, so its start is counted.

A figure stands only if the servers kept their own time: an answer may be late by 0.2 s of modelled time.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from parts import plain_clients
from parts.model_servers import MODEL, SLOTS, Servers, prompts

from draftfleet.embedded import Embedded
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing.workers import WorkerProcess, enqueue

LAG_ALLOWED_S = 0.2
CASES = ("equal", "slow", "returning")
CLIENTS = ("draftfleet", *plain_clients.CLIENTS)


@dataclass(frozen=True, slots=True)
class Figure:
    case: str
    client: str
    rows: int
    tokens: int
    seconds: float
    efficiency: float
    worst_lag_s: float
    """Mean lateness of the latest server's answers, in modelled seconds."""


def measure(case: str, client: str, num_rows: int, time_scale: float) -> Figure:
    servers = Servers(case, time_scale, num_rows)
    with tempfile.TemporaryDirectory() as folder, servers.running() as urls:
        ask = _fleet if client == "draftfleet" else _plain
        tokens, seconds = ask(Path(folder), client, urls, prompts(num_rows), servers)
        efficiency = tokens / servers.capacity(seconds)
        return Figure(case, client, num_rows, tokens, seconds, efficiency, servers.worst_lag_s())


def _fleet(folder: Path, client: str, urls: list[str], asked: list[Prompt], servers: Servers) -> tuple[int, float]:
    with Embedded(folder / "redis") as redis_server:
        storage = FileStorage(folder / "storage")
        flags = {
            "queue.url": redis_server.url, "storage.url": storage.url, "target.model": MODEL,
            "worker.servers": urls, "worker.concurrency": SLOTS,
        }  # fmt: skip
        settings = load(flags=flags)
        run = Run.create(storage, "bench", {"target.model": MODEL, "sampling.max_tokens": 8192}, {})
        names = enqueue(settings, run, asked, batch_size=settings.producer.batch_size)
        with WorkerProcess(settings, folder / "worker.log") as worker:
            started = servers.wait_for_first_request()
            _until(lambda: len(run.done()) == len(names))
            seconds = time.monotonic() - started
            worker.send(signal.SIGTERM)
            worker.wait()
        return sum(run.counts(name).tokens for name in names), seconds


def _plain(folder: Path, client: str, urls: list[str], asked: list[Prompt], servers: Servers) -> tuple[int, float]:
    rows = [{"key": prompt.row_key, "messages": prompt.messages} for prompt in asked]
    out = folder / "answers.jsonl"
    child = plain_clients.start(client, model=MODEL, urls=urls, rows=rows, slots=SLOTS, out=out)
    started = servers.wait_for_first_request()
    code = child.wait()
    seconds = time.monotonic() - started
    if code:
        raise SystemExit(f"the client {client} ended with code {code}")
    return plain_clients.total_tokens(plain_clients.answers(out)), seconds


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 1800
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("took more than half an hour")
        time.sleep(0.02)


def _print(figures: list[Figure]) -> None:
    print("\n| case | client | seconds | tokens/s | efficiency | of refill | lag |\n|---|---|---|---|---|---|---|")
    refill = {figure.case: figure.efficiency for figure in figures if figure.client == "refill"}
    for one in figures:
        beside = f"{one.efficiency / refill[one.case]:.3f}" if one.case in refill else ""
        late = f"{one.worst_lag_s:.2f} s" + (" (too late)" if one.worst_lag_s > LAG_ALLOWED_S else "")
        measured = f"{one.seconds:.1f} | {one.tokens / one.seconds:,.0f} | {one.efficiency:.3f}"
        print(f"| {one.case} | {one.client} | {measured} | {beside} | {late} |")
    print("\n" + json.dumps([asdict(figure) for figure in figures]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--time-scale", type=float, default=10)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--client", action="append", choices=CLIENTS)
    knobs = parser.parse_args()
    figures: list[Figure] = []
    for case in knobs.case or CASES:
        for client in knobs.client or CLIENTS:
            if client not in {"draftfleet", "refill"} and case == "returning":
                continue  # they have no way to go on
            figures.append(measure(case, client, knobs.rows, knobs.time_scale))
            print(f"{case}, {client}: {figures[-1].efficiency:.3f} in {figures[-1].seconds:.0f} s", file=sys.stderr)
    _print(figures)
    sys.exit(any(figure.worst_lag_s > LAG_ALLOWED_S for figure in figures))


if __name__ == "__main__":
    main()
