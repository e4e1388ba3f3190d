"""A million prompts: what producing them costs, producing them again, and looking at a run of that size.

    python benchmarks/million.py --rows 1000000

Writes a data set of short conversations, produces it (a process of its own, so that its memory can be measured), again
as it is, and with some rows more. Puts the sample shards of most batches with `Run.commit`, which is what workers do,
without the syncs. Then `draftfleet status`, and the two looks of the reconciler while some claims are held.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis

from draftfleet.claims import Claims
from draftfleet.embedded import Embedded
from draftfleet.queue import connect, make_app
from draftfleet.reconcile import Reconciler
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment, load
from draftfleet.storage import FileStorage, Storage, open_storage

MODEL = "million"
TEXT = (
    "the a of to and in is that it for on with as was at by this be from are which one you how why when river engine "
    "garden number history language machine light winter market answer question simple explain compare between method "
    "result water music city paper small large first second reason example teacher student write list describe"
)
WORDS = TEXT.split()
ANSWER = list(range(1000, 1050))


@dataclass(frozen=True, slots=True)
class Spent:
    """What one command took, and what it printed."""

    seconds: float
    cpu_s: float
    peak_mb: float
    printed: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--more", type=int, default=1000, help="rows that are added for the third pass")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--done", type=float, default=0.9, help="share of the batches that get a sample shard")
    parser.add_argument("--claims", type=int, default=200, help="claims that are held while the reconciler looks")
    knobs = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Embedded(Path(name) / "redis") as redis_server:
        folder = Path(name)
        flags = {
            "queue.url": redis_server.url,
            "storage.url": f"file://{folder / 'storage'}",
            "target.model": MODEL,
            "run": "million",
            "producer.batch_size": knobs.batch_size,
        }
        _print(measured(load(flags=flags), folder, knobs), knobs)


def measured(settings: Settings, folder: Path, knobs: argparse.Namespace) -> dict[str, Any]:
    """Every figure, in the order in which they are taken. Each is told at once, should the next take too long."""
    figures: dict[str, Any] = {}
    for part in _parts(settings, folder, knobs):
        print(json.dumps(part), file=sys.stderr, flush=True)
        figures |= part
    return figures


def _parts(settings: Settings, folder: Path, knobs: argparse.Namespace) -> Iterator[dict[str, Any]]:
    data, client = folder / "data.jsonl", connect(settings)
    empty_mb = _redis_mb(client)
    _write(data, 0, knobs.rows)
    yield {"load_before": _load(), "data_mb": round(data.stat().st_size / 1e6)}

    first = _command(settings, "produce", str(data))
    assert first.printed["new"] == knobs.rows, first.printed
    yield {"produce_rows_per_s": round(knobs.rows / first.seconds), **_spent("produce", first)}
    yield {"redis_mb": round(_redis_mb(client) - empty_mb, 1)}

    again = _command(settings, "produce", str(data))
    assert (again.printed["new"], again.printed["already"]) == (0, knobs.rows), again.printed
    yield _spent("again", again)

    _write(data, knobs.rows, knobs.rows + knobs.more)
    grown = _command(settings, "produce", str(data))
    assert (grown.printed["new"], grown.printed["already"]) == (knobs.more, knobs.rows), grown.printed
    yield _spent("grown", grown)

    run = Run.open(open_storage(settings.storage), settings.run)
    started = time.monotonic()
    yield {"samples_batches": _commit(run, knobs.done), "samples_s": round(time.monotonic() - started, 1)}
    for name in ("status", "status_again"):
        status = _command(settings, "status", "--json")
        assert status.printed["identity_holds"], status.printed
        yield _spent(name, status)
    yield _reconciled(settings, run, knobs.claims)
    yield {"redis_with_claims_mb": round(_redis_mb(client) - empty_mb, 1), "load_after": _load()}


def _spent(name: str, spent: Spent) -> dict[str, float]:
    figures = {"s": spent.seconds, "cpu_s": spent.cpu_s, "peak_mb": spent.peak_mb}
    return {f"{name}_{unit}": round(value, 2) for unit, value in figures.items()}


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _redis_mb(client: redis.Redis) -> float:
    return float(cast(dict[str, Any], client.info("memory"))["used_memory"]) / 1e6


def _write(path: Path, first: int, end: int) -> None:
    """Conversations of 300 to 600 bytes; the same for the same numbers."""
    with path.open("a") as file:
        for number in range(first, end):
            dice = random.Random(number)
            question = " ".join(dice.choices(WORDS, k=dice.randint(25, 45)))
            answer = " ".join(dice.choices(WORDS, k=dice.randint(10, 25)))
            turns = [{"from": "human", "value": f"{question} {number}?"}, {"from": "gpt", "value": answer}]
            file.write(json.dumps({"id": f"row-{number}", "conversations": turns}) + "\n")


def _command(settings: Settings, verb: str, *arguments: str) -> Spent:
    """Run `draftfleet VERB` and measure it, imports included."""
    read, write = os.pipe()
    started = time.monotonic()
    command = [sys.executable, "-m", "draftfleet", verb, *arguments]
    pid = os.posix_spawn(sys.executable, command, environment(settings), file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
    os.close(write)
    with open(read) as file:
        printed = file.read()
    _, code, usage = os.wait4(pid, 0)
    assert code == 0, f"{verb} ended with {code}"
    seconds = time.monotonic() - started
    return Spent(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3, json.loads(printed))


class Unsynced(FileStorage):
    """As fast as the disk is not: these shards need not survive a power cut."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)
        return True


def _commit(run: Run, share: float) -> int:
    """Returns how many batches are done."""
    batches = run.batches()
    done = batches[: int(share * len(batches))]
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        for _ in pool.map(_commit_some, [(run.storage.url, run.name, done[part::cores]) for part in range(cores)]):
            pass
    return len(done)


def _commit_some(part: tuple[str, str, list[str]]) -> None:
    url, name, batches = part
    storage: Storage = Unsynced(url.removeprefix("file://"))
    run = Run.open(storage, name)
    for batch in batches:
        run.commit(batch, list(_samples(run, batch)))
    run.index.flush()


def _samples(run: Run, batch: str) -> Iterator[Sample]:
    for prompt in run.read_prompts(batch):
        yield Sample(
            run_id=run.run_id,
            run=run.name,
            batch=batch,
            row_key=prompt.row_key,
            prompt_id=prompt.prompt_id,
            split=prompt.split,
            messages=prompt.messages,
            outcome="ok",
            finish_reason="stop",
            content="An answer.",
            token_ids=ANSWER,
            ids_source="engine",
            completion_tokens=len(ANSWER),
            model=MODEL,
        )


def _reconciled(settings: Settings, run: Run, num_claims: int) -> dict[str, Any]:
    """Both looks of a worker that has just started, and of one that has looked before."""
    client, app = connect(settings), make_app(settings)
    claims = Claims(client, run.run_id, settings.claims, "benchmark")
    for batch in run.outstanding()[:num_claims]:
        claims.take(batch)
    reconciler = Reconciler(app, client, run.storage, settings.claims)
    reconciler.discover()
    figures: dict[str, Any] = {}
    with _timed(figures, "redis_pass_s"):
        assert reconciler.sweep() == 0
    for key in ("storage_pass_s", "storage_pass_again_s"):
        with _timed(figures, key):
            assert reconciler.republish() == 0
    return figures


@contextmanager
def _timed(figures: dict[str, Any], key: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    figures[key] = round(time.monotonic() - started, 3)


def _print(figures: dict[str, Any], knobs: argparse.Namespace) -> None:
    print(f"\n{vars(knobs)} on {os.cpu_count()} cores, {platform.machine()}\n\n| figure | value |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value} |")
    print("\n" + json.dumps(vars(knobs) | figures))


if __name__ == "__main__":
    main()
