"""How well `draftfleet status` tells when a run will be finished: its estimate in simulated runs, beside what came.

    python benchmarks/eta.py                     three runs, 20 seeds each, a minute
    python benchmarks/eta.py --into FILE         the table, as Markdown

The rows, slots and speeds are simulated, event by event; what the workers would report at the moment goes through the
estimator as it is. An error is that of the time left, in shares of the whole time. A server that goes is known from
then on: before, nobody could tell.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draftfleet.eta import estimate
from draftfleet.lengths import bin_of
from draftfleet.live import LengthsReport, RunReport, ServerReport, WorkerReport

SLOTS, MAX_TOKENS, BATCH = 48, 8192, 64
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
"""Of all tokens, when `status` is asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: int
    source: str


@dataclass(slots=True)
class Server:
    speed: float
    """Tokens per second of one request."""
    dies_at: float = np.inf
    """The share of all tokens at which it goes for good; its rows are asked again elsewhere."""
    flying: dict[int, tuple[Answer, float]] = field(default_factory=dict[int, tuple[Answer, float]])


def heavy_tailed(random: np.random.Generator, num: int) -> list[Answer]:
    lengths = np.minimum(random.lognormal(np.log(1818) - 0.9**2 / 2, 0.9, num), MAX_TOKENS)
    return [Answer(int(length), "") for length in lengths]


def thinking_for_half(random: np.random.Generator, num: int) -> list[Answer]:
    means = np.where(random.uniform(size=num) < 0.5, np.log(400), np.log(2500))
    return [Answer(int(length), "") for length in np.minimum(random.lognormal(means, 0.7), MAX_TOKENS)]


def short_first(random: np.random.Generator, num: int) -> list[Answer]:
    """Two data sets one after the other: chats, then problems, of which few come early."""
    short = np.minimum(random.lognormal(np.log(400), 0.6, num // 2), MAX_TOKENS)
    long = np.minimum(random.lognormal(np.log(2500), 0.8, num - num // 2), MAX_TOKENS)
    mixed = [Answer(int(length), "chat") for length in short] + [Answer(int(length), "problems") for length in long]
    order = np.argsort(np.arange(num) + random.uniform(0, 0.9 * num, num))
    return [mixed[place] for place in order]


CASES: dict[str, tuple[Callable[[np.random.Generator, int], list[Answer]], Callable[[], list[Server]]]] = {
    "heavy tail, 7 equal servers": (heavy_tailed, lambda: [Server(75.0) for _ in range(7)]),
    "thinking drawn for half of the rows": (thinking_for_half, lambda: [Server(75.0) for _ in range(7)]),
    "heavy tail, one server at half speed, one dies at 3 %": (
        heavy_tailed,
        lambda: [Server(37.5), *(Server(75.0) for _ in range(5)), Server(75.0, dies_at=0.03)],
    ),
    "two data sets, short answers mostly first": (short_first, lambda: [Server(75.0) for _ in range(7)]),
}


def errors(case: str, num_rows: int, seed: int) -> dict[float, float]:
    """The error at each share of the work. Negative: it came later than was told."""
    draw, build = CASES[case]
    answers = draw(np.random.default_rng(seed), num_rows)
    told = list(told_at(answers, build()))
    end = told[-1][1]
    return {share: (at + seconds - end) / end for share, at, seconds in told[:-1]}


def told_at(answers: list[Answer], servers: list[Server]) -> Iterator[tuple[float, float, float]]:
    """(share of the work, time, seconds told); at last (1, the end, 0). Refills each slot at once, as the pool does."""
    waiting = list(reversed(answers))
    total, made, now, number = sum(answer.tokens for answer in answers), 0, 0.0, 0
    ended: Counter[tuple[str, int]] = Counter()
    events: list[tuple[float, int, int]] = []
    due = list(SHARES)
    while True:
        for place, server in enumerate(servers):
            while len(server.flying) < SLOTS and waiting and made < server.dies_at * total:
                answer, number = waiting.pop(), number + 1
                server.flying[number] = answer, now
                heapq.heappush(events, (now + answer.tokens / server.speed, place, number))
        if not events:
            yield 1.0, now, 0.0
            return
        now, place, which = heapq.heappop(events)
        if which not in servers[place].flying:
            continue
        answer, _ = servers[place].flying.pop(which)
        made += answer.tokens
        ended[answer.source, bin_of(answer.tokens)] += 1
        for server in servers:
            if made >= server.dies_at * total and server.flying:
                waiting += [answer for answer, _ in server.flying.values()]
                server.flying.clear()
        if due and made >= due[0] * total:
            report = report_at(now, ended, servers, is_dead=[made >= server.dies_at * total for server in servers])
            sources = Counter(answer.source for answer in waiting)
            shares = {source: num / len(waiting) for source, num in sources.items()}
            pending = len(answers) - ended.total()
            found = estimate([report], "run", pending=pending, max_tokens=MAX_TOKENS, waiting=shares)
            assert found.seconds is not None, found.why
            yield due.pop(0), now, found.seconds


def report_at(now: float, ended: Counter[tuple[str, int]], servers: list[Server], is_dead: list[bool]) -> WorkerReport:
    """As a worker would tell it, all batches with an open row being empty but for it."""
    flying = [
        (answer.source, bin_of((now - since) * one.speed)) for one in servers for answer, since in one.flying.values()
    ]
    lengths = [
        LengthsReport(
            source=source,
            ended={number: num for (its, number), num in ended.items() if its == source},
            going=Counter(number for its, number in flying if its == source),
        )
        for source in sorted({source for source, _ in [*ended, *flying]})
    ]
    reports = [
        ServerReport(
            url=str(place), state="away" if dead else "ready", in_flight=len(one.flying), limit=SLOTS, rows=0, tokens=0,
            tokens_per_s=0, speed=one.speed,
        )
        for place, (one, dead) in enumerate(zip(servers, is_dead, strict=True))
    ]  # fmt: skip
    run = RunReport(run="run", run_id="run", lengths=lengths)
    return WorkerReport(
        process="a",
        host="a",
        pid=1,
        started_at=0,
        state="working",
        servers=reports,
        rows_in_flight=len(flying),
        runs=[run],
    )


def table(num_rows: int, num_seeds: int) -> str:
    lines = ["| run | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |", "|---" * (1 + len(SHARES)) + "|"]
    for case in CASES:
        found = [errors(case, num_rows, seed) for seed in range(num_seeds)]
        cells: list[str] = []
        for share in SHARES:
            here = [one[share] for one in found]
            cells.append(f"{statistics.mean(here):+.1%} ({max(map(abs, here)):.1%})")
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--into", type=Path)
    args = parser.parse_args()
    text = table(args.rows, args.seeds)
    if args.into:
        args.into.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
