"""When a server has stopped to work: by counters that stand still, by gauges that show nothing, by silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workers.gauges import Gauges
from workers.watch import Patience, Watch

PATIENCE = Patience(stall_s=90, ghost_s=30)
BUSY = Gauges(running=4, waiting=0, steps=100)
EMPTY = Gauges(running=0, waiting=0, steps=100)


def looks(watch: Watch, seconds: int, start: int = 0, **seen: Any) -> Iterator[tuple[int, str]]:
    """A look every 5 seconds; gives the verdicts with their times."""
    defaults: dict[str, Any] = {"held": 4, "ended": 0, "gauges": BUSY, "is_heard": True, "patience": PATIENCE}
    for now in range(start, start + seconds, 5):
        values = {key: value(now) if callable(value) else value for key, value in (defaults | seen).items()}
        if why := watch.look(now, **values):
            yield now, why


def test_a_server_whose_counters_stand_still_while_we_hold_requests_has_stalled() -> None:
    verdicts = list(looks(Watch(), 100))

    assert verdicts == [(90, "its counters stood still for worker.stall_s = 90 s")]


def test_one_thought_that_takes_ten_minutes_is_no_stall_while_the_engine_makes_steps() -> None:
    assert not list(looks(Watch(), 600, gauges=lambda now: Gauges(running=1, waiting=0, steps=now)))


def test_answers_are_a_sign_of_life_as_well() -> None:
    assert not list(looks(Watch(), 600, ended=lambda now: now // 60))


def test_without_a_counter_of_steps_nothing_is_called_a_stall() -> None:
    assert not list(looks(Watch(), 2000, gauges=None))
    assert not list(looks(Watch(), 2000, gauges=Gauges(running=4, waiting=0, generated_tokens=7)))


def test_a_server_that_holds_nothing_of_ours_neither_stalls_nor_is_a_ghost() -> None:
    watch = Watch()

    assert not list(looks(watch, 600, held=0, gauges=EMPTY))
    # Its patience begins with the first request.
    assert [now for now, _ in looks(watch, 60, start=600, gauges=EMPTY)] == [630]


def test_a_server_that_says_it_works_on_nothing_though_we_wait_is_a_ghost() -> None:
    verdicts = list(looks(Watch(), 35, gauges=EMPTY))

    assert verdicts == [(30, "it says that it works on nothing, for worker.ghost_s = 30 s")]


def test_a_server_that_is_quicker_than_our_looks_is_no_ghost() -> None:
    assert not list(looks(Watch(), 600, gauges=EMPTY, ended=lambda now: now))


def test_a_server_that_answers_no_look_for_as_long_has_stalled_with_or_without_gauges() -> None:
    for gauges in (BUSY, None):
        verdicts = list(looks(Watch(), 100, is_heard=False, gauges=gauges))

        assert verdicts == [(90, "it answered no look for worker.stall_s = 90 s")]


def test_a_look_that_failed_between_others_is_no_silence() -> None:
    moving = list(looks(Watch(), 600, gauges=None, is_heard=lambda now: now % 50 != 0))

    assert not moving
