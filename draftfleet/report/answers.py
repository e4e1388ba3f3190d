"""What came of the rows: outcomes, errors, lengths and latencies, over all and in parts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from draftfleet.report import words
from draftfleet.report.charts import Chart, Series, histogram, spark
from draftfleet.report.rows import Row

MOST_PARTS = 40
PER_OCTAVE = 4
"""Bins between a number and its double."""

TONES = {"ok": "ok", "truncated": "cut", "failed": "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of the rows, each once. Lengths in tokens and times in seconds are of rows that were answered."""

    name: str
    rows: int
    ok: int
    truncated: int
    failed: int
    tokens: int
    lengths: dict[str, float]
    seconds: dict[str, float]
    length_path: str
    seconds_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Rows that failed of one kind, with the words of one of them."""

    kind: str
    rows: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """`groups` are parts by what they have in common: source, thinking, split."""

    whole: Part
    groups: dict[str, list[Part]]
    left_out: dict[str, int]
    lengths: Chart
    prompts: Chart
    seconds: Chart
    speeds: Chart
    faults: list[Fault]
    finish: list[tuple[str, int]]
    ids: list[tuple[str, int]]
    limit: int | None

    @property
    def every(self) -> dict[str, list[Part]]:
        """The whole, without a name, and the groups."""
        return {"": [self.whole], **self.groups}

    @property
    def cut_share(self) -> str:
        return words.share(self.whole.truncated, self.whole.ok + self.whole.truncated)


def answers_of(rows: Sequence[Row], limit: int | None) -> Answers:
    """`limit` is the run's `sampling.max_tokens`."""
    answered = [row for row in rows if row.outcome != "failed"]
    scale = _Bins(row.tokens for row in answered)
    clock = _Bins((row.seconds for row in answered if row.seconds > 0), write=words.duration)
    groups: dict[str, list[Part]] = {}
    left_out: dict[str, int] = {}
    names: dict[str, Callable[[Row], str]] = {
        "source": lambda row: row.source or "no source",
        "thinking": lambda row: "thinking" if row.thinking else "not thinking",
        "split": lambda row: row.split,
    }
    for group, name in names.items():
        parts = defaultdict[str, list[Row]](list)
        for row in rows:
            parts[name(row)].append(row)
        if len(parts) < 2 and group != "split":
            continue
        ordered = sorted(parts.items(), key=lambda one: (-len(one[1]), one[0]))
        groups[group] = [_part(part, some, scale, clock) for part, some in ordered[:MOST_PARTS]]
        if len(ordered) > MOST_PARTS:
            left_out[group] = len(ordered) - MOST_PARTS
    whole = _part("all", rows, scale, clock)
    speeds = _Bins(row.tokens / row.seconds for row in answered if row.seconds > 0 and not row.earlier and row.tokens)
    return Answers(
        whole=whole,
        groups=groups,
        left_out=left_out,
        lengths=_chart("Tokens of an answer", scale, answered, lambda row: row.tokens, "tokens"),
        prompts=_chart(
            "Tokens of a prompt",
            _Bins(row.prompt_tokens for row in answered if row.prompt_tokens > 0),
            [row for row in answered if row.prompt_tokens > 0],
            lambda row: row.prompt_tokens,
            "tokens",
        ),
        seconds=_chart("Seconds of a request", clock, answered, lambda row: row.seconds, "time"),
        speeds=_chart(
            "Tokens per second of a request",
            speeds,
            [row for row in answered if not row.earlier and row.tokens],
            lambda row: row.tokens / row.seconds if row.seconds > 0 else 0,
            "tokens/s",
        ),
        faults=_faults(rows),
        finish=Counter(row.finish_reason or "none" for row in rows).most_common(),
        ids=Counter(_ids(row) for row in answered).most_common(),
        limit=limit,
    )


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The nearest rank, at a tenth, a half, nine tenths and 99 of 100; and the largest."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: ordered[max(0, math.ceil(rank * len(ordered)) - 1)] for name, rank in ranks.items()}
    return found | {"max": ordered[-1]}


class _Bins:
    """Bins whose edges grow by a fixed factor, over the values that there are."""

    def __init__(self, values: Iterable[float], write: Callable[[float], str] = words.short) -> None:
        known = [value for value in values if value > 0]
        self._write = write
        self._first = math.floor(PER_OCTAVE * math.log2(min(known))) if known else 0
        last = math.floor(PER_OCTAVE * math.log2(max(known))) if known else 0
        self.count = last - self._first + 1
        self.names = [f"{write(self._edge(at))} to {write(self._edge(at + 1))}" for at in range(self.count)]
        every = max(1, -(-self.count // (PER_OCTAVE * 6))) * PER_OCTAVE
        start = -self._first % every
        self.ticks = [(at, write(self._edge(at))) for at in range(start, self.count, every)]

    def counted(self, values: Iterable[float]) -> list[float]:
        counts = [0.0] * self.count
        for value in values:
            if value > 0:
                at = math.floor(PER_OCTAVE * math.log2(value)) - self._first
                counts[min(self.count - 1, max(0, at))] += 1
        return counts

    def _edge(self, number: int) -> float:
        return 2 ** ((self._first + number) / PER_OCTAVE)


def _part(name: str, rows: Sequence[Row], scale: _Bins, clock: _Bins) -> Part:
    outcomes = Counter(row.outcome for row in rows)
    answered = [row for row in rows if row.outcome != "failed"]
    lengths = [row.tokens for row in answered]
    seconds = [row.seconds for row in answered if row.seconds > 0]
    return Part(
        name=name,
        rows=len(rows),
        ok=outcomes["ok"],
        truncated=outcomes["truncated"],
        failed=outcomes["failed"],
        tokens=sum(row.tokens for row in rows),
        lengths=quantiles(lengths),
        seconds=quantiles(seconds),
        length_path=spark(scale.counted(lengths)),
        seconds_path=spark(clock.counted(seconds)),
    )


def _chart(title: str, bins: _Bins, rows: Sequence[Row], value: Callable[[Row], float], what: str) -> Chart:
    values = {outcome: [value(row) for row in rows if row.outcome == outcome] for outcome in ("ok", "truncated")}
    series = [Series(name, bins.counted(some), TONES[name]) for name, some in values.items() if some]
    found = quantiles([one for some in values.values() for one in some if one > 0])
    write = words.duration if what == "time" else words.short
    said = ", ".join(f"{name} {write(at)}" for name, at in found.items())
    return histogram(
        title, bins.names, series, summary=said or "No row says it.", ticks=bins.ticks, what=what, height=140
    )


def _faults(rows: Iterable[Row]) -> list[Fault]:
    found = defaultdict[str, list[Row]](list)
    for row in rows:
        if row.outcome == "failed":
            found[row.kind or "unknown"].append(row)
    ordered = sorted(found.items(), key=lambda one: -len(one[1]))
    return [Fault(kind=kind, rows=len(some), example=words.clipped(some[0].error, 240)) for kind, some in ordered]


def _ids(row: Row) -> str:
    if row.ids_source == "none":
        return "none"
    return row.ids_source if row.ids_match else f"{row.ids_source}, not as many as the server counted"
