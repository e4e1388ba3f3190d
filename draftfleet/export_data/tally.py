"""What was exported, counted line by line, for the card and for the result: sums and counters, no rows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftfleet.export_data.units import Unit

MOST_KINDS = 50
"""Of what rows drew, or came from: beyond so many the rest is counted together."""

QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(slots=True)
class Tally:
    """`lines` are what was written; all else counts the answers in them. `keys` is the hash of the keys in order."""

    lines: Counter[str] = field(default_factory=Counter[str])
    answers: Counter[str] = field(default_factory=Counter[str])
    outcomes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    finish_reasons: Counter[str] = field(default_factory=Counter[str])
    ids_sources: Counter[str] = field(default_factory=Counter[str])
    models: Counter[str] = field(default_factory=Counter[str])
    sources: Counter[str] = field(default_factory=Counter[str])
    drawn: Counter[str] = field(default_factory=Counter[str])
    prompt_lengths: Counter[int] = field(default_factory=Counter[int])
    completion_lengths: Counter[int] = field(default_factory=Counter[int])
    left_out: Counter[str] = field(default_factory=Counter[str])
    with_reasoning: int = 0
    with_tool_calls: int = 0
    mismatched: int = 0
    _keys: Any = field(default_factory=hashlib.sha256)

    def add(self, unit: Unit) -> None:
        sample = unit.sample
        self.lines[sample.split] += 1
        self._keys.update(f"{unit.key}\n".encode())
        _count(self.models, sample.model)
        _count(self.sources, str(getattr(sample, "source", None) or ""))
        if sample.drawn is not None:
            _count(self.drawn, json.dumps(sample.drawn, sort_keys=True))
        for row in unit.rows:
            self.answers[sample.split] += 1
            self.outcomes.setdefault(sample.split, Counter())[row.outcome] += 1
            self.finish_reasons[row.finish_reason or "unknown"] += 1
            self.ids_sources[row.ids_source] += 1
            self.with_reasoning += bool(row.reasoning)
            self.with_tool_calls += bool(row.tool_calls)
            self.mismatched += not row.ids_match_usage
            if row.ids_source != "none":
                self.prompt_lengths[len(row.prompt_token_ids)] += 1
                self.completion_lengths[len(row.token_ids)] += 1

    @property
    def keys(self) -> str:
        return self._keys.hexdigest()

    @property
    def num_lines(self) -> int:
        return self.lines.total()

    @property
    def num_answers(self) -> int:
        return self.answers.total()

    @property
    def prompt_tokens(self) -> int:
        return total(self.prompt_lengths)

    @property
    def completion_tokens(self) -> int:
        return total(self.completion_lengths)


def total(lengths: Mapping[int, int]) -> int:
    return sum(length * count for length, count in lengths.items())


def quantiles(lengths: Mapping[int, int]) -> dict[str, int]:
    """The smallest length, those at QUANTILES (the nearest rank) and the largest; nothing of no lengths."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    number = sum(lengths.values())
    found = {"min": ordered[0]}
    for name, share in QUANTILES.items():
        rank, seen = max(1, -int(-share * number // 1)), 0
        for length in ordered:
            seen += lengths[length]
            if seen >= rank:
                found[name] = length
                break
    return found | {"max": ordered[-1]}


def histogram(lengths: Mapping[int, int]) -> list[tuple[str, int]]:
    """How many there are in ranges that double: `1-1`, `2-3`, `4-7`, ...; without the empty ends."""
    bins = Counter[int]()
    for length, count in lengths.items():
        bins[length.bit_length()] += count
    if not bins:
        return []
    return [
        (f"{1 << (size - 1)}-{(1 << size) - 1}" if size else "0", bins[size])
        for size in range(min(bins), max(bins) + 1)
    ]


def _count(counter: Counter[str], name: str) -> None:
    counter[name if name in counter or len(counter) < MOST_KINDS else "others"] += 1
