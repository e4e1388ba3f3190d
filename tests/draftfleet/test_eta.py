from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftfleet.eta import estimate
from draftfleet.lengths import bin_of
from draftfleet.live import LengthsReport, RunReport, ServerReport, WorkerReport


def server(state: str = "ready", limit: int = 10, speed: float = 20.0) -> ServerReport:
    return ServerReport.model_validate(
        {"url": "u", "state": state, "in_flight": limit, "limit": limit, "speed": speed}
        | dict.fromkeys(("rows", "tokens", "tokens_per_s"), 0)
    )


def worker(
    *servers: ServerReport, ended: int = 100, going: int = 10, source: str = "", tokens: int = 100
) -> WorkerReport:
    """All answers have the same length; those in flight have just begun."""
    lengths = LengthsReport(source=source, ended={bin_of(tokens): ended}, going={0: going} if going else {})
    return WorkerReport(
        process="p",
        host="h",
        pid=1,
        started_at=0,
        state="working",
        servers=list(servers),
        rows_in_flight=going,
        runs=[RunReport(run="run", run_id="id", lengths=[lengths])],
    )


def test_equal_answers_take_their_tokens_over_what_all_slots_make_and_then_one_answer() -> None:
    told = estimate([worker(server())], "id", pending=1010, max_tokens=400)

    assert told.mean_tokens == pytest.approx(100, rel=0.05)
    assert told.capacity_tokens_per_s == 200
    assert told.tokens_left == pytest.approx(1010 * 100, rel=0.05)
    assert told.seconds == pytest.approx(1000 * 100 / 200 + 100 / 20, rel=0.05)


def test_rows_that_are_finished_and_stand_in_no_shard_are_not_left() -> None:
    busy = worker(server())
    done = busy.model_copy(update={"runs": [busy.runs[0].model_copy(update={"ok": 500, "failed": 5})]})

    assert estimate([done], "id", pending=1010, max_tokens=400).rows_left == 505


def test_a_server_that_is_away_makes_nothing() -> None:
    both = estimate([worker(server(), server())], "id", pending=10_000, max_tokens=400)
    one = estimate([worker(server(), server("away"))], "id", pending=10_000, max_tokens=400)

    assert both.seconds is not None
    assert one.seconds == pytest.approx(2 * both.seconds, rel=0.02)


def test_another_run_on_the_same_servers_takes_its_share_of_the_slots() -> None:
    alone = worker(server())
    shared = alone.model_copy(update={"rows_in_flight": 20})

    told = [estimate([one], "id", pending=10_000, max_tokens=400).seconds for one in (alone, shared)]

    assert told[0] is not None
    assert told[1] == pytest.approx(2 * told[0], rel=0.02)


def test_each_source_that_waits_counts_with_its_own_mean() -> None:
    short, long = worker(server(), source="short", tokens=50), worker(server(), source="long", tokens=300)

    told = estimate([short, long], "id", pending=10_000, max_tokens=400, waiting={"long": 1.0})

    assert told.mean_tokens == pytest.approx(300, rel=0.06)


def test_after_a_restart_the_mean_of_the_shards_counts() -> None:
    told = estimate([worker(server(), ended=20)], "id", pending=10_000, max_tokens=400, in_shards=(5000, 5000 * 250))

    assert told.mean_tokens == 250


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ([], "no worker is there"),
        ([worker(server("away"))], "no server is ready and has answered"),
        ([worker(server(speed=0))], "no server is ready and has answered"),
        ([worker(server(), going=0)], "no row of it is in flight"),
        ([worker(server(), ended=3)], "too few answers have ended"),
    ],
)
def test_what_cannot_be_told_says_why(reports: list[WorkerReport], why: str) -> None:
    told = estimate(reports, "id", pending=500, max_tokens=400)

    assert (told.seconds, told.why) == (None, why)
    assert told.rows_left == 500


def test_a_run_without_rows_left_is_finished_now() -> None:
    assert estimate([], "id", pending=0, max_tokens=400).seconds == 0


def _benchmark() -> Any:
    path = Path(__file__).parents[2] / "benchmarks/eta.py"
    spec = importlib.util.spec_from_file_location("eta_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", [0, 1, 2])
def test_a_simulated_run_ends_within_a_tenth_of_what_was_told_after_a_twentieth(case: int) -> None:
    benchmark = _benchmark()

    errors = benchmark.errors(list(benchmark.CASES)[case], 20_000, 1)

    assert Counter(abs(error) < 0.1 for error in errors.values()) == {True: len(benchmark.SHARES)}
