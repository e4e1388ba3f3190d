"""The measurement: windows of the two servers by turns, so that a machine that slows down meanwhile is fair to both."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from draftfleet.settings import Sampling
from workers.bench import differences, figures
from workers.bench.differences import Difference
from workers.bench.figures import Window
from workers.bench.sides import Question, Side, check_drafting
from workers.bench.streams import Answer

WARM_UP_TOKENS = 16
"""Enough for every kind of step, compiled or recorded for this number of requests, to have been made once."""
WAVES = 2
"""A window has so many times as many requests as are in flight, if there are as many prompts: towards its end fewer
are."""

Advance = Callable[[int], object]
"""Told how many more requests have ended."""


@dataclass(slots=True)
class Plan:
    """What is asked, how often, and so many at a time. `questions` are all that there are."""

    questions: list[Question]
    limit: int
    concurrency: Sequence[int]
    repeat: int

    def window(self, concurrency: int) -> list[Question]:
        """At least `limit`, and two waves; fewer where there are fewer, but never fewer than are in flight at once."""
        wanted = max(self.limit, WAVES * concurrency)
        count = max(min(wanted, len(self.questions)), concurrency)
        return list(islice(cycle(self.questions), count))

    def requests(self, num_sides: int) -> int:
        """All of them, warm-ups included."""
        return sum(num_sides * (level + self.repeat * len(self.window(level))) for level in self.concurrency)


@dataclass(slots=True)
class Measurement:
    """Grows as it goes on, so that what was measured before a server ended is kept."""

    sides: Sequence[Side]
    plan: Plan
    advance: Advance = lambda requests: None
    windows: list[Window] = field(default_factory=list[Window])
    differences: list[Difference] = field(default_factory=list[Difference])
    _salt: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def run(self) -> None:
        """Raises ServerError."""
        for number, level in enumerate(self.plan.concurrency):
            for side in self.sides:
                await self._warm_up(side, level, is_first=number == 0)
            for repeat in range(self.plan.repeat):
                for side in self.sides if repeat % 2 == 0 else reversed(self.sides):
                    self.windows.append(await self._window(side, level, repeat))

    async def look_into_differences(self) -> None:
        """Of the greedy answers, the first pair of each prompt that parts. Raises ServerError."""
        found: dict[str, tuple[Difference, Question, Answer]] = {}
        for one, other in self._pairs():
            asked = self.plan.window(one.concurrency)
            for question, mine, yours in zip(asked, one.answers, other.answers, strict=True):
                if not figures.is_equal(mine, yours) and mine.ids and yours.ids:
                    difference = differences.first(question, one.concurrency, mine, yours)
                    found.setdefault(question.prompt.prompt_id, (difference, question, yours))
        self.differences = await differences.explained(self.sides[-1], list(found.values()))

    def _pairs(self) -> Iterator[tuple[Window, Window]]:
        without = {(one.concurrency, one.repeat): one for one in self.windows if one.side == "without"}
        for one in self.windows:
            if one.side == "with" and (one.concurrency, one.repeat) in without:
                yield one, without[one.concurrency, one.repeat]

    async def _warm_up(self, side: Side, concurrency: int, *, is_first: bool) -> None:
        short = [
            replace(question, sampling=_at_most(question.sampling, WARM_UP_TOKENS))
            for question in self.plan.window(concurrency)[:concurrency]
        ]
        answers = await self._ask_all(side, short, concurrency, f"{self._salt}-warm-up")
        if is_first:
            await check_drafting(side, answers)

    async def _window(self, side: Side, concurrency: int, repeat: int) -> Window:
        asked = self.plan.window(concurrency)
        before = await side.counters()
        began = time.perf_counter()
        answers = await self._ask_all(side, asked, concurrency, f"{self._salt}-{concurrency}-{repeat}")
        seconds = time.perf_counter() - began
        after = await side.counters_after(before, len(asked))
        told = [answer.acceptance for answer in answers if answer.acceptance is not None]
        counted = None if after.requests is None or before.requests is None else after.requests - before.requests
        return Window(
            side=side.name,
            concurrency=concurrency,
            repeat=repeat,
            seconds=seconds,
            answers=answers,
            acceptance=figures.pooled(told) if told else after.since(before),
            others=None if counted is None else int(counted) - len(asked),
        )

    async def _ask_all(self, side: Side, asked: list[Question], concurrency: int, salt: str) -> list[Answer]:
        """In their order, so many in flight. The first error ends them all."""
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(asked))

        async def ask_on() -> None:
            for number, question in waiting:
                answers[number] = await side.ask(question, salt)
                self.advance(1)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(ask_on())
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return [answers[number] for number in range(len(asked))]


def _at_most(sampling: Sampling, tokens: int) -> Sampling:
    return sampling.model_copy(update={"max_tokens": min(tokens, sampling.max_tokens)})
