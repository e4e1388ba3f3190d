"""Where greedy answers of the two servers part, and whether the target had two tokens that it liked the same there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftfleet.errors import ServerError
from workers.bench.sides import Question, Side
from workers.bench.streams import Answer

NEAR_TIE = 0.25
"""In nats. A logit between 16 and 32 has steps of 0.125 in bfloat16, and each of the two may be off by one."""
MOST = 8
"""Differences that are looked into."""
CANDIDATES = 5
PATIENCE_S = 30.0
"""For the one token that is asked for: what was measured is not kept waiting for a server that hangs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two answers differ, as ids. `gap` is how much more the server without the drafter likes
    the one than the other, in nats; None where that could not be asked, or one is not among the likeliest."""

    prompt_id: str
    concurrency: int
    position: int
    with_drafter: int | None
    without: int | None
    gap: float | None = None

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap <= NEAR_TIE


def first(question: Question, concurrency: int, one: Answer, other: Answer) -> Difference:
    """An answer that ended where the other goes on has no token there."""
    place = next(
        (place for place, (mine, yours) in enumerate(zip(one.ids, other.ids, strict=False)) if mine != yours),
        min(len(one.ids), len(other.ids)),
    )
    return Difference(
        prompt_id=question.prompt.prompt_id,
        concurrency=concurrency,
        position=place,
        with_drafter=one.ids[place] if place < len(one.ids) else None,
        without=other.ids[place] if place < len(other.ids) else None,
    )


async def explained(side: Side, found: Sequence[tuple[Difference, Question, Answer]]) -> list[Difference]:
    """With the gaps, of the first few. `side` is the server without the drafter, the answers are its own."""
    return [
        await _explained(side, difference, question, answer) if number < MOST else difference
        for number, (difference, question, answer) in enumerate(found)
    ]


async def _explained(side: Side, difference: Difference, question: Question, answer: Answer) -> Difference:
    if not answer.prompt_ids or difference.with_drafter is None or difference.without is None:
        return difference
    one_token = question.sampling.model_copy(update={"max_tokens": 1})
    ids = [*answer.prompt_ids, *answer.ids[: difference.position]]
    ask = replace(side.ask_of(question), sampling=one_token, prompt_token_ids=ids)
    request = side.dialect.continuation(ask)
    if request is None:
        return difference
    is_vllm = side.dialect.NAME == "vllm"
    extra = {"logprobs": CANDIDATES, "return_tokens_as_token_ids": True}
    if not is_vllm:
        extra = {"return_logprob": True, "top_logprobs_num": CANDIDATES}
    try:
        async with asyncio.timeout(PATIENCE_S):
            body = await side.post(request.path, {**request.body, **extra})
        likely = _of_vllm(body) if is_vllm else _of_sglang(body)
    except (ServerError, TimeoutError, KeyError, IndexError, TypeError, ValueError):
        return difference  # it stays unexplained: nothing that was measured depends on it
    if difference.with_drafter in likely and difference.without in likely:
        return replace(difference, gap=abs(likely[difference.without] - likely[difference.with_drafter]))
    return difference


def _of_vllm(body: dict[str, Any]) -> dict[int, float]:
    """By token id its log-probability: `{"token_id:17": -0.3, ...}` of the one token that was asked for."""
    said: dict[str, float] = body["choices"][0]["logprobs"]["top_logprobs"][0]
    return {int(name.removeprefix("token_id:")): value for name, value in said.items()}


def _of_sglang(body: dict[str, Any]) -> dict[int, float]:
    """`[[-0.3, 17, null], ...]`"""
    return {int(token): float(value) for value, token, *_ in body["meta_info"]["output_top_logprobs"][0]}
