"""How full servers were kept, from looks at them."""

from __future__ import annotations

from dataclasses import dataclass

from workers.filling import Filling
from workers.watch import Patience, Watch


@dataclass
class Slots:
    url: str
    limit: int
    in_flight: int


def test_slots_count_while_they_are_offered_and_no_more_than_those_are_filled() -> None:
    filling = Filling()
    half, over = Slots("a", 8, 4), Slots("b", 2, 3)

    filling.look(0, [half, over])
    filling.look(10, [half, over])
    filling.look(20, [half])  # b was away
    filling.look(30, [half, over])
    filling.look(40, [])  # there was no work
    filling.look(50, [half])

    assert dict(filling.slot_s) == {"a": 240, "b": 20}
    assert dict(filling.busy_s) == {"a": 120, "b": 20}


def test_a_server_is_silent_from_when_it_last_moved_and_only_while_it_holds_something() -> None:
    watch = Watch()
    assert watch.silent_s(0) == 0

    def look(now: float, held: int, ended: int) -> None:
        watch.look(now, held=held, ended=ended, gauges=None, is_heard=True, patience=Patience())

    look(10, 2, 0)
    look(40, 2, 0)
    assert watch.silent_s(50) == 40
    look(60, 1, 1)
    assert watch.silent_s(65) == 5
    look(70, 0, 2)
    assert watch.silent_s(90) == 0
