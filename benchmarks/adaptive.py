"""The adaptive limit of a server against the best pinned one, on the shipped model of a server.

    python benchmarks/adaptive.py
    python benchmarks/adaptive.py --shape kv --time-scale 10

One server whose speed grows with its load and saturates, in two shapes: `kv`, whose cache holds about 110 answers and
preempts beyond, and `slots`, which works on 48 requests at once and lets the others wait. A worker asks it with each
pinned limit, then with the adaptive one from a start at 4 and from a start at 512. Counted are the tokens of complete
answers between minute 5 and minute 15 of the modelled time, and the preemptions per answer in these minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from parts.model_servers import ALONE_S, HALF_SPEED_AT, LENGTHS, MODEL, prompts

from draftfleet.embedded import Embedded
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeProcess
from draftfleet.testing.workers import WorkerProcess, enqueue

SHAPES = {"kv": {"slots": 1024, "kv_tokens": 225_000}, "slots": {"slots": 48}}
PINNED = {"kv": (64, 96, 112, 128, 160), "slots": (32, 48, 64)}
STARTS = (4, 512)
PREFILL_S = ALONE_S / 3
"""Per token of a prompt, and of all that a preempted answer has to compute again. Where both are bound by arithmetic,
an engine reads about three tokens in the time of writing one."""
FROM_S, UNTIL_S = 300.0, 900.0
NUM_ROWS = 6_000
LOOK_S = 5.0
LAG_ALLOWED_S = 0.2
LEAST_SHARE, MOST_PREEMPTED = 0.95, 0.01


@dataclass(frozen=True, slots=True)
class Figure:
    shape: str
    limit: str
    tokens_per_s: float
    """Of modelled time."""
    preempted: float
    """Preemptions per answer."""
    last_limit: int
    lag_s: float
    """Mean, in modelled seconds."""


def measure(shape: str, time_scale: float, *, pinned: int | None = None, start: int | None = None) -> Figure:
    flags = {
        "target.model": MODEL,
        "worker.probe_interval_s": LOOK_S / time_scale,
        **({} if pinned is None else {"worker.concurrency": pinned}),
        **({} if start is None else {"worker.start_concurrency": start}),
    }
    server = FakeProcess(
        model=MODEL,
        seconds_per_token=ALONE_S,
        seconds_per_prompt_token=PREFILL_S,
        half_speed_at=HALF_SPEED_AT,
        time_scale=time_scale,
        **LENGTHS,
        **SHAPES[shape],
    )
    with tempfile.TemporaryDirectory() as name, Embedded(Path(name) / "redis") as redis_server, server:
        storage = FileStorage(Path(name) / "storage")
        flags |= {"queue.url": redis_server.url, "storage.url": storage.url, "worker.servers": [server.url]}
        settings = load(flags=flags)
        run = Run.create(storage, "bench", {"target.model": MODEL, "sampling.max_tokens": 8192}, {})
        enqueue(settings, run, prompts(NUM_ROWS), batch_size=64)
        log = Path(name) / "worker.log"
        with WorkerProcess(settings, log) as worker:
            while not server.stats(rows=False)["requests"]:
                time.sleep(0.02)
            time.sleep(FROM_S / time_scale)
            before, began = server.stats(rows=False), time.monotonic()
            time.sleep((UNTIL_S - FROM_S) / time_scale)
            after, seconds = server.stats(rows=False), time.monotonic() - began
            changes = worker.said("concurrency changed")
    answers = after["statuses"].get("200", 0) - before["statuses"].get("200", 0)
    last = int(changes[-1].partition(" limit=")[2].split()[0]) if changes else pinned or start or 0
    return Figure(
        shape=shape,
        limit=f"pinned {pinned}" if pinned else f"adaptive from {start}",
        tokens_per_s=(after["tokens"] - before["tokens"]) / seconds / time_scale,
        preempted=(after["preemptions"] - before["preemptions"]) / max(answers, 1),
        last_limit=last,
        lag_s=after["reply_lag_s"]["mean"] * time_scale,
    )


def _print(figures: list[Figure]) -> bool:
    """Whether every adaptive figure is as good as it should be."""
    columns = ("shape", "limit", "tokens/s", "of the best pinned", "preempted", "last limit", "lag")
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    is_good = True
    for one in figures:
        best = max(each.tokens_per_s for each in figures if each.shape == one.shape and each.limit.startswith("pinned"))
        share = one.tokens_per_s / best
        if one.limit.startswith("adaptive"):
            is_good &= share >= LEAST_SHARE and one.preempted < MOST_PREEMPTED
        measured = f"{one.tokens_per_s:,.0f} | {share:.3f} | {one.preempted:.2%} | {one.last_limit} | {one.lag_s:.2f} s"
        print(f"| {one.shape} | {one.limit} | {measured} |")
    print("\n" + json.dumps([asdict(figure) for figure in figures]))
    return is_good and all(figure.lag_s <= LAG_ALLOWED_S for figure in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-scale", type=float, default=15)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    knobs = parser.parse_args()
    figures: list[Figure] = []
    for shape in knobs.shape or SHAPES:
        for pinned in PINNED[shape]:
            figures.append(measure(shape, knobs.time_scale, pinned=pinned))
            print(figures[-1], file=sys.stderr)
        for start in STARTS:
            figures.append(measure(shape, knobs.time_scale, start=start))
            print(figures[-1], file=sys.stderr)
    sys.exit(not _print(figures))


if __name__ == "__main__":
    main()
