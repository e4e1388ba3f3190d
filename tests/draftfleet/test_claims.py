"""Claims: one holder at a time, attempts counted only for lapses without progress, Redis that forgets."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from draftfleet.claims import Claims, Held, Holding, Lapsed, Taken, new_token
from draftfleet.embedded import Embedded
from draftfleet.settings import load

Until = Callable[..., Any]
BATCH = "train-000000"


@pytest.fixture
def client(redis_server: Embedded) -> redis.Redis:
    return redis.Redis.from_url(redis_server.url, decode_responses=True)


@pytest.fixture
def make_claims(client: redis.Redis) -> Callable[..., Claims]:
    run_id = uuid.uuid4().hex

    def make(owner: str, ttl_s: float = 60) -> Claims:
        return Claims(client, run_id, load(flags={"claims.ttl_s": ttl_s}).claims, owner)

    return make


def taken(claims: Claims, name: str = BATCH) -> Taken:
    answer = claims.take(name)
    assert isinstance(answer, Taken)
    return answer


def test_a_live_claim_keeps_others_out_and_names_its_holder(make_claims: Callable[..., Claims]) -> None:
    first, second = make_claims("first"), make_claims("second")

    assert taken(first).attempt == 1

    assert second.take(BATCH) == Held("first")
    assert second.holder(BATCH) == "first"


def test_of_many_that_take_at_once_exactly_one_gets_it(make_claims: Callable[..., Claims]) -> None:
    takers = [make_claims(f"taker-{number}") for number in range(16)]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda claims: claims.take(BATCH), takers))

    assert sum(isinstance(answer, Taken) for answer in answers) == 1


def test_who_asks_again_because_the_answer_was_lost_has_the_claim(make_claims: Callable[..., Claims]) -> None:
    claims, token = make_claims("holder"), new_token()
    claims.take(BATCH, token)

    assert claims.take(BATCH, token) == Taken(token, attempt=1)
    assert claims.take(BATCH) == Held("holder")


def test_a_released_claim_is_free_at_once_and_counts_no_attempt(make_claims: Callable[..., Claims]) -> None:
    first, second = make_claims("first"), make_claims("second")
    token = taken(first).token

    assert first.release(BATCH, token) is True

    assert taken(second).attempt == 1
    assert first.release(BATCH, token) is False


def test_a_lapse_without_progress_counts_an_attempt(make_claims: Callable[..., Claims], until: Until) -> None:
    holder, other = make_claims("holder", ttl_s=0.05), make_claims("other")
    taken(holder)

    answer = until(lambda: isinstance(answer := other.take(BATCH), Taken) and answer)

    assert answer.attempt == 2


def test_a_lapse_with_saved_rows_counts_none_and_forgives_earlier_ones(
    make_claims: Callable[..., Claims], until: Until
) -> None:
    holder = make_claims("holder", ttl_s=0.05)
    taken(holder)
    assert until(holder.sweep) == [Lapsed(BATCH, 1)]
    again = taken(holder)
    assert again.attempt == 2
    holder.renew({BATCH: Holding(again.token, saved_rows=5)})

    assert until(holder.sweep) == [Lapsed(BATCH, 0)]

    assert taken(holder).attempt == 1


def test_a_holder_that_was_taken_for_dead_and_renews_its_claim_cost_no_attempt(
    make_claims: Callable[..., Claims], until: Until
) -> None:
    dead, holder, third = make_claims("dead", ttl_s=0.02), make_claims("holder", ttl_s=0.02), make_claims("third")
    dead.take("b")
    until(dead.sweep)
    taken = holder.take("b")
    until(holder.sweep)

    renewals = [holder.renew({"b": Holding(taken.token)})["b"] for _ in range(2)]

    assert renewals == ["retaken", "kept"]
    assert [lapsed.attempts for lapsed in until(third.sweep)] == [2]  # that of the dead one, and this


def test_renewal_keeps_a_claim_alive_and_reports_each(make_claims: Callable[..., Claims]) -> None:
    claims, other = make_claims("ours"), make_claims("other")
    token = taken(claims).token
    stolen = taken(other, "train-000001")

    answers = claims.renew(
        {BATCH: Holding(token), "train-000001": Holding("not the token"), "train-000002": Holding("forgotten")}
    )

    assert answers == {BATCH: "kept", "train-000001": "lost", "train-000002": "retaken"}
    assert other.is_ours("train-000001", stolen.token)


def test_a_wiped_redis_gives_the_claim_back_to_its_holder(
    make_claims: Callable[..., Claims], client: redis.Redis
) -> None:
    claims = make_claims("holder")
    token = taken(claims).token
    client.flushall()

    assert claims.renew({BATCH: Holding(token)}) == {BATCH: "retaken"}
    assert make_claims("other").take(BATCH) == Held("holder")


def test_a_holder_that_lost_its_claim_is_told_and_cannot_release_it(
    make_claims: Callable[..., Claims], until: Until
) -> None:
    frozen, other = make_claims("frozen", ttl_s=0.05), make_claims("other")
    token = taken(frozen).token
    until(lambda: isinstance(other.take(BATCH), Taken))

    assert frozen.renew({BATCH: Holding(token)}) == {BATCH: "lost"}
    assert frozen.release(BATCH, token) is False
    assert other.holder(BATCH) == "other"


def test_the_sweep_returns_each_lapsed_claim_to_one_caller(make_claims: Callable[..., Claims], until: Until) -> None:
    holder, sweeper = make_claims("holder", ttl_s=0.05), make_claims("sweeper")
    for number in range(20):
        taken(holder, f"train-{number:06d}")
    living = make_claims("living")
    taken(living, "train-000099")

    seen: list[str] = []
    until(lambda: seen.extend(lapsed.name for lapsed in sweeper.sweep()) or len(seen) == 20)

    assert len(set(seen)) == 20
    assert sweeper.held() == {"train-000099"}


def test_a_redis_that_was_away_for_longer_than_a_claim_lives_costs_no_claim_and_no_attempt(
    make_claims: Callable[..., Claims], redis_server: Embedded, until: Until
) -> None:
    holder, other = make_claims("holder", ttl_s=0.5), make_claims("other", ttl_s=0.5)
    claim = taken(holder)
    assert redis_server.process is not None
    redis_server.process.kill()
    redis_server.process.wait()

    end = time.monotonic() + 0.6
    until(lambda: time.monotonic() > end, what="the claim's time to be over")
    redis_server.start()

    assert other.sweep() == []
    assert other.take(BATCH) == Held("holder")
    assert holder.renew({BATCH: Holding(claim.token)}) == {BATCH: "kept"}
    # A holder that ended while Redis was away is found all the same.
    assert until(other.sweep, what="the lapse") == [Lapsed(BATCH, 1)]
