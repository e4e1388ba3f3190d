"""What a kill -9 of a worker costs: time, and rows asked again.

    python benchmarks/worker_recovery.py
    python benchmarks/worker_recovery.py --claim 10 --backlog 1000

Two workers share a run over fake servers, with a long backlog of batches behind; one is killed in the middle, and a
third is started in its place. Recovery is the time from the kill until the last batch that the killed worker held is
done.
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
from pathlib import Path
from typing import Any

from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.embedded import Embedded
from draftfleet.queue import connect, queued
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeProcess
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

MODEL = "fake"
BATCH_SIZE, CONCURRENCY, LATENCY_S = 8, 16, 0.5
CLAIMS_S = (60.0, 10.0)


def measure(claim_s: float, backlog: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, Embedded(Path(name) / "redis") as redis_server:
        folder = Path(name)
        storage = FileStorage(folder / "storage")
        flags = {
            "queue.url": redis_server.url,
            "storage.url": storage.url,
            "target.model": MODEL,
            "worker.concurrency": CONCURRENCY,
            "claims.ttl_s": claim_s,
            "claims.renew_s": claim_s / 4,
        }
        settings = load(flags=flags)
        run = Run.create(storage, "bench", {"target.model": MODEL, "sampling.max_tokens": 4096}, {})
        redis = connect(settings)
        behaviour = {"model": MODEL, "latency_s": LATENCY_S, "tokens": 200}
        prompts = _prompts(backlog * BATCH_SIZE)
        with FakeProcess(**behaviour) as one, FakeProcess(**behaviour) as other:
            enqueue(settings, run, prompts, batch_size=BATCH_SIZE)
            first = WorkerProcess(changed(settings, worker__servers=[one.url]), folder / "first.log")
            second = WorkerProcess(changed(settings, worker__servers=[other.url]), folder / "second.log")
            third = WorkerProcess(changed(settings, worker__servers=[one.url]), folder / "third.log")
            with first, second:
                _until(lambda: len(run.done()) >= 40)
                claims = Claims(redis, run.run_id, settings.claims, "benchmark")
                owner = f"-{first.pid}-"
                held = [batch for batch in claims.held() if owner in (claims.holder(batch) or "")]
                first.send(signal.SIGKILL)
                killed = time.monotonic()
                with third:
                    _until(lambda: all(run.is_done(batch) for batch in held))
                    recovery_s = time.monotonic() - killed
                    left = queued(redis, MODEL)
                    for worker in (second, third):
                        worker.send(signal.SIGTERM)
                    for worker in (second, third):
                        worker.wait(90)
            asked = sum(server.stats(rows=False)["requests"] for server in (one, other)) - 3  # one canary per worker
        keys = Counter(sample.row_key for batch in run.done() for sample in run.read_samples(batch))
        partial = {sample.row_key for name in run.partials() for sample in run.read_partial(name)}
        account = Accountant(run).account()
    return {
        "claim_s": claim_s,
        "batches_waiting": left,
        "batches_held_at_kill": len(held),
        "recovery_s": round(recovery_s, 1),
        "rows_doubled": sum(count > 1 for count in keys.values()),
        "rows_asked_again": asked - len(keys.keys() | partial),
        "in_flight_plus_one_interval": CONCURRENCY
        + int(CONCURRENCY * settings.worker.checkpoint_interval_s / LATENCY_S),
        "identity_holds": account.holds and account.failed == 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", type=float, action="append", help="seconds; 60 and 10 if not given")
    parser.add_argument("--backlog", type=int, default=10_000, help="batches")
    knobs = parser.parse_args()
    figures = [measure(claim_s, knobs.backlog) for claim_s in knobs.claim or CLAIMS_S]
    print("| " + " | ".join(figures[0]) + " |\n" + "|---" * len(figures[0]) + "|")
    for figure in figures:
        print("| " + " | ".join(map(str, figure.values())) + " |")
    print("\n" + json.dumps(figures))
    sys.exit(any(figure["rows_doubled"] or not figure["identity_holds"] for figure in figures))


def _prompts(count: int) -> list[Prompt]:
    conversations = [[{"role": "user", "content": f"Question {number}?"}] for number in range(count)]
    return [Prompt(prompt_id(messages, None), "train", messages) for messages in conversations]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 540
    while not condition():
        assert time.monotonic() < end, "took more than nine minutes"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
