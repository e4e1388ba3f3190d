"""The fake server's model of continuous batching, against cases worked by hand and against a slow version of itself."""

from __future__ import annotations

import random
from typing import Any

import pytest

from draftfleet.testing import Behaviour
from draftfleet.testing.engine import Engine, Sequence


def engine(**settings: Any) -> Engine:
    return Engine(Behaviour(**settings), now=0.0)


def sequence(tokens: int, prompt_tokens: int = 0) -> Sequence:
    return Sequence(prompt_tokens=prompt_tokens, tokens=tokens)


def run_out(one: Engine) -> None:
    """Until nobody is left."""
    while (at := one.next_at()) is not None:
        one.advance(at)
    assert one.running == one.waiting == 0


def test_a_sequence_alone_takes_its_latency_its_prompt_and_its_tokens() -> None:
    settings = {"latency_s": 1, "seconds_per_prompt_token": 0.1, "seconds_per_token": 0.5}
    ends: list[float | None] = []

    for more in ({}, {"speed": 0.5}, {"time_scale": 10}):
        one, alone = engine(**settings, **more), sequence(tokens=20, prompt_tokens=10)
        one.add(alone, 0.0)
        run_out(one)
        ends.append(alone.ended_at)

    assert ends == pytest.approx([1 + 1 + 10, 24, 1.2])


def test_without_any_time_set_an_answer_is_there_at_once() -> None:
    one, first = engine(), sequence(tokens=2000, prompt_tokens=500)

    assert one.add(first, 7.0) == [first]
    assert first.ended_at == 7.0
    assert one.generated == 2000


def test_whoever_joins_slows_the_others_from_then_on_and_whoever_ends_lets_them_be_fast_again() -> None:
    # Two are at half the speed of one. At 5 s the first has 5 of its 10 tokens; it gets the others at 15 s, and the
    # second, which has 5 by then, its last at 20 s.
    one = engine(seconds_per_token=1, half_speed_at=1)
    first, second = sequence(10), sequence(10)

    one.add(first, 0.0)
    one.add(second, 5.0)
    run_out(one)

    assert (first.ended_at, second.ended_at) == (15.0, 20.0)


def test_the_tokens_per_second_of_a_server_rise_with_its_load_and_saturate() -> None:
    rates: list[float] = []
    for num_running in (1, 8, 65, 512, 4096):
        one = engine(seconds_per_token=0.01, half_speed_at=64)
        for _ in range(num_running):
            one.add(sequence(100), 0.0)
        at = one.next_at()
        assert at is not None
        rates.append(100 * num_running / at)

    assert rates[0] == pytest.approx(100)
    assert rates[2] == pytest.approx(65 * 100 / 2)
    assert rates == sorted(rates)
    assert 0.98 * 64 * 100 < rates[-1] < 64 * 100


def test_more_requests_than_slots_wait_and_come_in_the_order_in_which_they_came() -> None:
    one = engine(slots=2, seconds_per_token=1)
    all_ = [sequence(tokens) for tokens in (4, 1, 2, 1)]

    for each in all_:
        one.add(each, 0.0)
    assert (one.running, one.waiting) == (2, 2)
    run_out(one)

    assert [each.ended_at for each in all_] == [4.0, 1.0, 3.0, 4.0]
    assert one.peak == 2


def test_a_full_cache_puts_the_youngest_out_which_computes_its_own_tokens_again_and_generates_none_twice() -> None:
    # Both hold 10 + 40 tokens at 41 s, which fills the cache of 100. The younger is put out, and finds no room before
    # the older ends at 101 s. Then it computes its 50 tokens in 5 s, and generates the other 60.
    one = engine(seconds_per_token=1, seconds_per_prompt_token=0.1, kv_tokens=100)
    older, younger = sequence(100, prompt_tokens=10), sequence(100, prompt_tokens=10)
    one.add(older, 0.0)
    one.add(younger, 0.0)

    one.advance(40.0)
    assert one.preemptions == 0
    assert one.kv_usage == pytest.approx(0.98)
    one.advance(42.0)
    assert (one.preemptions, one.running, one.waiting) == (1, 1, 1)
    assert one.generated == pytest.approx(40 + 41)
    run_out(one)

    assert (older.ended_at, younger.ended_at) == pytest.approx((101, 166))
    assert one.preemptions == 1
    assert one.generated == pytest.approx(200)
    assert one.kv_usage == 0


def test_a_sequence_that_is_larger_than_the_cache_runs_alone() -> None:
    one = engine(seconds_per_token=1, kv_tokens=100)
    large, small = sequence(300, prompt_tokens=200), sequence(10)

    one.add(large, 0.0)
    one.add(small, 0.0)
    run_out(one)

    assert (large.ended_at, small.ended_at) == pytest.approx((300, 310))
    assert one.preemptions == 0


def test_a_crowded_cache_preempts_often_and_still_ends_all() -> None:
    one = engine(seconds_per_token=0.01, seconds_per_prompt_token=0.0001, half_speed_at=64, kv_tokens=5000)
    all_ = [sequence(50 + 7 * number, prompt_tokens=20) for number in range(100)]

    for number, each in enumerate(all_):
        one.add(each, number * 0.01)
        assert one.held_tokens <= 5000 + one.running
    run_out(one)

    assert one.preemptions > 20
    assert one.generated == pytest.approx(sum(each.tokens for each in all_))
    assert all(each.ended_at is not None for each in all_)


def test_a_client_that_goes_leaves_its_slot_and_its_share() -> None:
    one = engine(slots=2, seconds_per_token=1, half_speed_at=1)
    stays, goes, waits, gives_up = (sequence(10) for _ in range(4))
    for each in (stays, goes, waits, gives_up):
        one.add(each, 0.0)

    one.remove(gives_up, 2.0)
    one.remove(waits, 2.0)
    one.remove(goes, 2.0)
    run_out(one)

    assert stays.ended_at == 11.0
    assert goes.ended_at is None
    assert one.generated == 11.0


def test_a_frozen_engine_keeps_everything_as_it_is_and_goes_on_from_there() -> None:
    one, first = engine(seconds_per_token=1), sequence(10)
    one.add(first, 0.0)

    one.change(Behaviour(seconds_per_token=1, frozen=True), 4.0)
    assert one.next_at() is None
    assert one.advance(100.0) == []
    frozen = (one.running, one.generated)
    one.change(Behaviour(seconds_per_token=1, speed=2), 100.0)
    run_out(one)

    assert frozen == (1, 4.0)
    assert first.ended_at == 103.0


def test_looking_late_and_rarely_changes_no_moment() -> None:
    ends: list[list[float | None]] = []
    for step_s in (0.5, 1000.0):
        one = engine(slots=3, seconds_per_token=0.1, half_speed_at=2, kv_tokens=120)
        all_ = [sequence(10 + 3 * number, prompt_tokens=5) for number in range(12)]
        for each in all_:
            one.add(each, 0.0)
        now = 0.0
        while one.running:
            now += step_s
            one.advance(now)
        ends.append([each.ended_at for each in all_])

    assert ends[0] == pytest.approx(ends[1])


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_a_model_that_goes_step_by_step(seed: int) -> None:
    dice = random.Random(seed)
    settings = {
        "slots": 4,
        "seconds_per_token": 0.05,
        "seconds_per_prompt_token": 0.01,
        "half_speed_at": 3,
        "speed": 0.8,
    }
    arrivals = sorted((dice.uniform(0, 10), dice.randint(1, 40), dice.randint(1, 30)) for _ in range(25))

    one = engine(**settings)
    fast = [sequence(tokens, prompt_tokens) for _, tokens, prompt_tokens in arrivals]
    for (at, _, _), each in zip(arrivals, fast, strict=True):
        one.add(each, at)
    run_out(one)

    assert [each.ended_at for each in fast] == pytest.approx(_step_by_step(arrivals, step_s=0.001), abs=0.05)


def _step_by_step(arrivals: list[tuple[float, int, int]], step_s: float) -> list[float]:
    """The ends of the same sequences, from as many steps as it takes. With the settings of the test above."""
    left = {number: tokens * 0.05 + prompt * 0.01 for number, (_, tokens, prompt) in enumerate(arrivals)}
    ends: dict[int, float] = {}
    running: list[int] = []
    now = 0.0
    while left:
        came = [n for n in left if arrivals[n][0] <= now and n not in running]
        running += came[: 4 - len(running)]
        for number in running:
            left[number] -= step_s * 0.8 / (1 + (len(running) - 1) / 3)
        now += step_s
        for number in [n for n in running if left[n] <= 0]:
            ends[number] = now
            running.remove(number)
            del left[number]
    return [ends[number] for number in range(len(arrivals))]
