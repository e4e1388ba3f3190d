"""What a kill -9 of a worker costs with the settings as they are: time, and tokens generated twice.

    python benchmarks/worker_recovery.py

Two workers share a run over fake servers; one is killed in the middle, and a third is started in its place. Recovery is
the time from the kill until the last batch that the killed worker held is done.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.embedded import Embedded
from draftfleet.queue import connect
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeProcess
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

MODEL = "fake"
ROWS, BATCH_SIZE, CONCURRENCY, LATENCY_S = 4800, 64, 16, 0.5


def main() -> None:
    with tempfile.TemporaryDirectory() as name, Embedded(Path(name) / "redis") as redis_server:
        folder = Path(name)
        storage = FileStorage(folder / "storage")
        flags = {
            "queue.url": redis_server.url,
            "storage.url": storage.url,
            "target.model": MODEL,
            "worker.concurrency": CONCURRENCY,
        }
        settings = load(flags=flags)
        run = Run.create(storage, "bench", {"target.model": MODEL, "sampling.max_tokens": 4096}, {})
        redis = connect(settings)
        behaviour = {"model": MODEL, "latency_s": LATENCY_S, "tokens": 200}
        with FakeProcess(**behaviour) as one, FakeProcess(**behaviour) as other:
            names = enqueue(settings, run, _prompts(ROWS), batch_size=BATCH_SIZE)
            first = WorkerProcess(changed(settings, worker__servers=[one.url]), folder / "first.log")
            second = WorkerProcess(changed(settings, worker__servers=[other.url]), folder / "second.log")
            third = WorkerProcess(changed(settings, worker__servers=[one.url]), folder / "third.log")
            with first, second:
                _until(lambda: len(run.done()) >= 12)
                claims = Claims(redis, run.run_id, settings.claims, "benchmark")
                owner = f"-{first.pid}-"
                held = [batch for batch in claims.held() if owner in (claims.holder(batch) or "")]
                first.send(signal.SIGKILL)
                killed = time.monotonic()
                with third:
                    _until(lambda: set(held) <= set(run.done()))
                    recovery_s = time.monotonic() - killed
                    _until(lambda: run.done() == names)
            asked = sum(server.stats()["requests"] for server in (one, other)) - 3  # one canary per worker
            keys = Counter(sample.row_key for batch in names for sample in run.read_samples(batch))
            account = Accountant(run).account()
    figures = {
        "claim_ttl_s": settings.claims.ttl_s,
        "batches_held_at_kill": len(held),
        "recovery_s": round(recovery_s, 1),
        "rows": len(keys),
        "rows_doubled": sum(count > 1 for count in keys.values()),
        "rows_asked_again": asked - ROWS,
        "in_flight_plus_one_interval": CONCURRENCY
        + int(CONCURRENCY * settings.worker.checkpoint_interval_s / LATENCY_S),
        "identity_holds": account.holds and account.pending == 0 and account.failed == 0,
    }
    print("| " + " | ".join(figures) + " |\n" + "|---" * len(figures) + "|")
    print("| " + " | ".join(map(str, figures.values())) + " |\n\n" + json.dumps(figures))


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
