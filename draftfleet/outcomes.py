"""What became of rows: how many ended in which way, and which of several samples of one row counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Self, TypeVar

from draftfleet.records import Outcome, Sample, Turn

RANK: dict[Outcome, int] = {"ok": 0, "truncated": 1, "failed": 2, "unfinished": 3}
"""The smaller beats the larger."""

Rank = tuple[int, int, int]
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Counts:
    """What one or more sample shards hold.

    `earlier` are the assistant turns before a row's own. `cut_short` are conversations that ended before their source
    did: those that count as ok ended at tool calls, the others as their outcome says.
    """

    ok: int = 0
    truncated: int = 0
    failed: int = 0
    tokens: int = 0
    mismatched: int = 0
    earlier: int = 0
    cut_short_ok: int = 0
    cut_short_truncated: int = 0
    cut_short_failed: int = 0

    @property
    def rows(self) -> int:
        return self.ok + self.truncated + self.failed

    @property
    def turns(self) -> int:
        """Assistant turns that the target finished: as many training rows as there may be."""
        return self.ok + self.truncated + self.earlier

    def __add__(self, other: Counts) -> Counts:
        return Counts.total([self, other])

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def total(cls, counts: Sequence[Counts]) -> Self:
        """Their sum; of many at a tenth of the time that `+` takes."""
        return cls(*(sum(getattr(one, name) for one in counts) for name in cls.__slots__))

    @classmethod
    def one(
        cls,
        outcome: Outcome,
        completion_tokens: int,
        turns: Sequence[Turn] = (),
        *,
        ids_match_usage: bool,
        is_cut_short: bool = False,
    ) -> Self:
        """Of one row."""
        matching = all(turn.ids_match_usage for turn in turns) and (outcome == "failed" or ids_match_usage)
        tokens = _tokens(completion_tokens, turns)
        cut_short = {f"cut_short_{outcome}": 1} if is_cut_short else {}
        return cls(**{outcome: 1}, tokens=tokens, mismatched=int(not matching), earlier=len(turns), **cut_short)

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Self:
        """`tokens` are completion tokens; `mismatched` are rows with ids that are not as many as the server counted."""
        return cls.total(
            [
                cls.one(
                    sample.outcome,
                    sample.completion_tokens,
                    sample.turns,
                    ids_match_usage=sample.ids_match_usage,
                    is_cut_short=sample.ended is not None,
                )
                for sample in samples
            ]
        )


def best(samples: Iterable[Sample]) -> dict[str, Sample]:
    """One sample per row key: ok beats truncated beats failed, more turns beat fewer, and of two answers that were cut
    the longer counts; the first of equals stays. `rank` says the same of counts."""
    return each_once(((sample.row_key, sample) for sample in samples), _rank)


def each_once(records: Iterable[tuple[str, Record]], rank_of: Callable[[Record], Rank]) -> dict[str, Record]:
    """By row key, of all records of a row the one with the smallest rank. The first of equals stays."""
    chosen: dict[str, Record] = {}
    for key, record in records:
        if key not in chosen or rank_of(record) < rank_of(chosen[key]):
            chosen[key] = record
    return chosen


def order(outcome: str, num_earlier: int, tokens: int) -> Rank:
    """Of one record of a row, with its earlier turns and the tokens of all: the smaller, the better."""
    ranks: Mapping[str, int] = RANK  # pyright: ignore[reportAssignmentType]  also asked for what is no outcome
    return ranks.get(outcome, len(ranks)), -num_earlier, -tokens * (outcome == "truncated")


def _rank(sample: Sample) -> Rank:
    return order(sample.outcome, len(sample.turns), _tokens(sample.completion_tokens, sample.turns))


def rank(counts: Counts) -> Rank:
    """Of one row: the smaller, the better."""
    outcome = next(number for number, found in enumerate((counts.ok, counts.truncated, counts.failed)) if found)
    return outcome, -counts.earlier, -counts.tokens * counts.truncated


def _tokens(completion_tokens: int, turns: Sequence[Turn]) -> int:
    return max(completion_tokens, 0) + sum(max(turn.completion_tokens, 0) for turn in turns)
