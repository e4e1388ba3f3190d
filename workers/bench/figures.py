"""What was measured, window by window, and the figures that are made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from workers.bench.counters import Acceptance, pooled
from workers.bench.differences import Difference
from workers.bench.sides import Name
from workers.bench.streams import Answer


@dataclass(frozen=True, slots=True)
class Window:
    """All questions once, to one server, so many at a time. `others` are requests of other clients meanwhile; None
    where the server does not count requests."""

    side: Name
    concurrency: int
    repeat: int
    seconds: float
    answers: list[Answer]
    acceptance: Acceptance | None
    others: int | None

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def first_token_s(self) -> float:
        return fmean(answer.first_token_s for answer in self.answers)

    @property
    def inter_token_s(self) -> float:
        """Over all tokens together."""
        parts = [answer.inter_token_s for answer in self.answers]
        return sum(seconds for seconds, _ in parts) / max(sum(tokens for _, tokens in parts), 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Figures:
    """One server at one concurrency. `tokens` are those of a window; `acceptance_length` is of all windows together."""

    tokens_per_s: Spread
    inter_token_s: Spread
    first_token_s: Spread
    requests: int
    tokens: int
    windows: int
    acceptance_length: float | None
    acceptance_per_position: list[float]

    @classmethod
    def of(cls, windows: Sequence[Window]) -> Figures:
        accepted = pooled([window.acceptance for window in windows if window.acceptance is not None])
        return cls(
            tokens_per_s=Spread.of([window.tokens_per_s for window in windows]),
            inter_token_s=Spread.of([window.inter_token_s for window in windows]),
            first_token_s=Spread.of([window.first_token_s for window in windows]),
            requests=len(windows[0].answers),
            tokens=round(median(window.tokens for window in windows)),
            windows=len(windows),
            acceptance_length=None if accepted is None else accepted.length,
            acceptance_per_position=[] if accepted is None else accepted.shares,
        )


@dataclass(frozen=True, slots=True)
class Level:
    """`speedup` is of each pair of windows, tokens/s with the drafter over those without. `equal` of `compared` answers
    were the same on both sides, at temperature 0."""

    concurrency: int
    with_drafter: Figures | None = None
    without: Figures | None = None
    speedup: Spread | None = None
    equal: int | None = None
    compared: int | None = None


@dataclass(slots=True, kw_only=True)
class Bench:
    """The whole of it. `error` is why it ended early: then the figures are of what was measured until there.

    `checkpoint` is that of the run's latest export for this engine, which the server is taken to serve.
    """

    model: str
    dialect: str
    with_url: str
    without_url: str | None
    prompts_from: str
    max_tokens: int
    temperature: float
    repeat: int
    at: str
    drafter: str | None = None
    checkpoint: str | None = None
    seconds: float = 0.0
    levels: list[Level] = field(default_factory=list[Level])
    acceptance: Acceptance | None = None
    differences: list[Difference] = field(default_factory=list[Difference])
    warnings: list[str] = field(default_factory=list[str])
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: with the acceptance length and the shares by position written out."""
        said = asdict(self)
        if self.acceptance is not None:
            said["acceptance"] = {
                "acceptance_length": self.acceptance.length,
                "acceptance_per_position": self.acceptance.shares,
                **{name: value for name, value in asdict(self.acceptance).items() if name != "gauge"},
            }
        return said

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"


def levels(windows: Sequence[Window], *, compares: bool) -> list[Level]:
    """In the order in which they were measured. A level that was broken off has what there is of it."""
    order = dict.fromkeys(window.concurrency for window in windows)
    return [_level(number, [one for one in windows if one.concurrency == number], compares) for number in order]


def _level(concurrency: int, windows: list[Window], compares: bool) -> Level:
    by_side = {name: [one for one in windows if one.side == name] for name in ("with", "without")}
    pairs = [(one, other) for one in by_side["with"] for other in by_side["without"] if one.repeat == other.repeat]
    both = [
        is_equal(first, second)
        for one, other in pairs
        for first, second in zip(one.answers, other.answers, strict=True)
    ]
    return Level(
        concurrency=concurrency,
        with_drafter=Figures.of(by_side["with"]) if by_side["with"] else None,
        without=Figures.of(by_side["without"]) if by_side["without"] else None,
        speedup=Spread.of([one.tokens_per_s / other.tokens_per_s for one, other in pairs]) if pairs else None,
        equal=sum(both) if compares and pairs else None,
        compared=len(both) if compares and pairs else None,
    )


def is_equal(one: Answer, other: Answer) -> bool:
    """By ids where both servers tell them, else by text."""
    if one.ids and other.ids:
        return one.ids == other.ids
    return one.text == other.text
