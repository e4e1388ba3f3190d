"""What became of rows: how many ended in which way, and which of several samples of one row counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Self

from draftfleet.records import Outcome, Sample

RANK: dict[Outcome, int] = {"ok": 0, "truncated": 1, "failed": 2}
"""The smaller beats the larger."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What one or more sample shards hold."""

    ok: int = 0
    truncated: int = 0
    failed: int = 0
    tokens: int = 0
    mismatched: int = 0

    @property
    def rows(self) -> int:
        return self.ok + self.truncated + self.failed

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.ok + other.ok,
            self.truncated + other.truncated,
            self.failed + other.failed,
            self.tokens + other.tokens,
            self.mismatched + other.mismatched,
        )

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def total(cls, counts: Sequence[Counts]) -> Self:
        """Their sum; of many at a tenth of the time that `+` takes."""
        return cls(*(sum(getattr(one, name) for one in counts) for name in cls.__slots__))

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Self:
        """`tokens` are completion tokens; `mismatched` are rows whose ids are not as many as the server counted."""
        ok = truncated = failed = tokens = mismatched = 0
        for sample in samples:
            ok += sample.outcome == "ok"
            truncated += sample.outcome == "truncated"
            failed += sample.outcome == "failed"
            tokens += max(sample.completion_tokens, 0)
            mismatched += sample.outcome != "failed" and not sample.ids_match_usage
        return cls(ok, truncated, failed, tokens, mismatched)


def best(samples: Iterable[Sample]) -> dict[str, Sample]:
    """One sample per row key: ok beats truncated beats failed, the first of equals stays."""
    chosen: dict[str, Sample] = {}
    for sample in samples:
        held = chosen.get(sample.row_key)
        if held is None or RANK[sample.outcome] < RANK[held.outcome]:
            chosen[sample.row_key] = sample
    return chosen
