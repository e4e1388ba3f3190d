from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from draftfleet.lengths import FEWEST, Lengths, bin_of, tokens_of

MOST = 8192


def drawn(num: int = 20_000) -> np.ndarray:
    return np.minimum(np.random.default_rng(3).lognormal(np.log(1200), 0.9, num), MOST)


def counted(lengths: np.ndarray) -> Counter[int]:
    return Counter(map(bin_of, lengths))


def test_a_bin_holds_its_lower_limit_and_is_a_sixteenth_of_an_octave_wide() -> None:
    assert [bin_of(0), bin_of(0.5), bin_of(1), bin_of(2), bin_of(4)] == [0, 0, 1, 17, 33]
    assert all(bin_of(tokens_of(number) * 1.001) == number for number in range(1, 300))


def test_where_all_have_ended_the_mean_is_theirs() -> None:
    lengths = drawn()

    told = Lengths.of(counted(lengths), {}, MOST)

    assert told is not None
    assert told.mean == pytest.approx(lengths.mean(), rel=0.01)
    assert told.at(1200) == pytest.approx((lengths >= 1200).mean(), abs=0.01)


def test_answers_in_flight_correct_the_mean_of_those_that_ended() -> None:
    """Each slot takes one answer after the other; at a moment when each has ended two or so, the long ones fly."""
    lengths, now = drawn(), 3000.0
    ended, going = list[float](), list[float]()
    for slot in np.array_split(lengths, 1000):
        ends = np.cumsum(slot)
        ended += slot[ends <= now].tolist()
        going.append(now - (ends[ends <= now].max() if (ends <= now).any() else 0.0))

    told = Lengths.of(counted(np.array(ended)), counted(np.array(going)), MOST)

    assert told is not None
    assert np.mean(ended) < 0.7 * lengths.mean()
    assert told.mean == pytest.approx(lengths.mean(), rel=0.08)


def test_what_an_answer_has_still_to_go_grows_with_what_it_has_where_the_tail_is_heavy() -> None:
    lengths = drawn()
    told = Lengths.of(counted(lengths), {}, MOST)

    assert told is not None
    for has in (0, 500, 2000, 5000):
        assert told.beyond(has) == pytest.approx((lengths[lengths > has] - has).mean(), rel=0.03)
    assert told.beyond(MOST) == 0


def test_the_last_of_many_ends_when_the_largest_does() -> None:
    lengths = drawn()
    told = Lengths.of(counted(lengths), {}, MOST)
    groups = lengths[:20_000].reshape(-1, 20)

    assert told is not None
    for speed in (1.0, 50.0):
        expected = groups.max(axis=1).mean() / speed
        assert told.until_all_ended(np.zeros(20), np.full(20, speed)) == pytest.approx(expected, rel=0.05)
    assert told.until_all_ended(np.zeros(0), np.ones(0)) == 0


def test_answers_in_flight_for_long_have_the_ages_of_a_slot_looked_at_at_random() -> None:
    lengths = drawn()
    told = Lengths.of(counted(lengths), {}, MOST)
    ages = np.random.default_rng(4).choice(lengths, 50_000, p=lengths / lengths.sum()) * np.random.default_rng(
        5
    ).random(50_000)

    assert told is not None
    assert np.median(told.in_flight(400)) == pytest.approx(np.median(ages), rel=0.03)


def test_nothing_is_told_of_a_few() -> None:
    assert Lengths.of({5: FEWEST - 1}, {9: 100}, MOST) is None


def test_past_the_longest_that_ended_it_goes_on_and_ends_at_the_most_there_may_be() -> None:
    told = Lengths.of({bin_of(100): 50, bin_of(150): 50}, {bin_of(200): 100}, MOST)

    assert told is not None
    assert told.at(200) > 0.3
    assert 100 < told.mean < MOST
    assert told.at(MOST + 1) == 0
