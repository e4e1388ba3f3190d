"""Charts as geometry: paths, grid lines and ticks for an inline SVG, and the table that says the same in figures.

Across, all is in thousandths of the width, which the page stretches to what it has; down, in pixels. So text keeps its
size on a phone. docs/decisions/0016-charts-are-our-own-svg.md says why no library draws them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from draftfleet.report import words
from draftfleet.report.spread import Times

WIDTH = 1000
HEIGHT = 190
HEAD = 22
"""Above the highest value: the label of its grid line."""

TONES = 8
"""Colours of series: `t0` to `t7`. More series than these become one."""

Number = Callable[[float], str]
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


@dataclass(frozen=True, slots=True)
class Series:
    """`values` are one per bin or place; None where there is none."""

    name: str
    values: Sequence[float | None]
    tone: str


@dataclass(frozen=True, slots=True)
class Shape:
    """`kind` is area, bar, line or step."""

    path: str
    kind: str
    tone: str


@dataclass(frozen=True, slots=True)
class Label:
    """`at` is in percent of the width, or in pixels from the top."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`summary` says in a sentence what is to be seen. `places` are where each row of the table lies, in percent."""

    title: str
    summary: str
    unit: str = ""
    height: int = HEIGHT
    grid: list[Label] = field(default_factory=list[Label])
    ticks: list[Label] = field(default_factory=list[Label])
    shapes: list[Shape] = field(default_factory=list[Shape])
    legend: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    places: list[float] = field(default_factory=list[float])
    head: list[str] = field(default_factory=list[str])
    rows: list[list[str]] = field(default_factory=list[list[str]])


def over_time(
    title: str,
    times: Times,
    series: Sequence[Series],
    *,
    summary: str,
    unit: str,
    write: Number = words.short,
    outline: Sequence[Series] = (),
    height: int = HEIGHT,
) -> Chart:
    """Areas on top of each other; `outline` are steps in front of them."""
    sums = _stack([one.values for one in series])
    tops = [*(sums[-1] if sums else []), *(value or 0 for one in outline for value in one.values)]
    top, grid = _scale(max(tops, default=0), height, write)
    middles = times.middles()
    xs = [WIDTH * times.part(at) for at in middles]
    shapes = [
        Shape(_area(xs, low, high, top, height), "area", one.tone)
        for one, low, high in zip(series, [[0.0] * times.count, *sums], sums, strict=False)
    ]
    shapes += [Shape(_steps(times.count, one.values, top, height), "step", one.tone) for one in outline]
    every = [*series, *outline]
    return Chart(
        title=title,
        summary=summary,
        unit=unit,
        height=height,
        grid=grid,
        ticks=time_ticks(times),
        shapes=shapes,
        legend=_legend(every),
        places=[round(x / 10, 2) for x in xs],
        head=["time (UTC)", *(one.name for one in every)],
        rows=[
            [words.moment(at), *(_cell(one.values[number], write) for one in every)]
            for number, at in enumerate(middles)
        ],
    )


def histogram(
    title: str,
    bins: Sequence[str],
    series: Sequence[Series],
    *,
    summary: str,
    ticks: Sequence[tuple[int, str]],
    what: str,
    height: int = HEIGHT,
) -> Chart:
    """Bars on top of each other. `ticks` name the left edges of bins by their number."""
    sums = _stack([one.values for one in series])
    top, grid = _scale(max(sums[-1], default=0) if sums else 0, height, words.short)
    width = WIDTH / max(len(bins), 1)
    shapes = [
        Shape(_bars(low, high, top=top, height=height, width=width), "bar", one.tone)
        for one, low, high in zip(series, [[0.0] * len(bins), *sums], sums, strict=False)
    ]
    return Chart(
        title=title,
        summary=summary,
        unit=what,
        height=height,
        grid=grid,
        ticks=[Label(round(number * width / 10, 2), text) for number, text in ticks],
        shapes=shapes,
        legend=_legend(series),
        places=[round((number + 0.5) * width / 10, 2) for number in range(len(bins))],
        head=[what, *(one.name for one in series)],
        rows=[[name, *(_cell(one.values[number], words.number) for one in series)] for number, name in enumerate(bins)],
    )


def curves(
    title: str,
    steps: Sequence[float],
    series: Sequence[Series],
    *,
    summary: str,
    what: str = "step",
    unit: str = "",
    write: Number = words.short,
    from_zero: bool = False,
    dots: bool = False,
) -> Chart:
    """Lines over numbers that ascend."""
    known = [value for one in series for value in one.values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low = 0.0 if from_zero or low > 0 > low - 0.3 * (high - low) else low
    marks = _marks(low, high)
    bottom, top = marks[0], marks[-1]
    first, last = (steps[0], steps[-1]) if steps else (0.0, 1.0)
    xs = [WIDTH * (step - first) / ((last - first) or 1) for step in steps]
    if len(steps) == 1:
        xs = [WIDTH / 2]

    def down(value: float) -> float:
        return HEAD + (HEIGHT - HEAD) * (1 - (value - bottom) / ((top - bottom) or 1))

    shapes: list[Shape] = []
    for one in series:
        points = [(x, down(value)) for x, value in zip(xs, one.values, strict=True) if value is not None]
        shapes.append(Shape("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else "", "line", one.tone))
        if dots or len(points) == 1:
            shapes.append(Shape("".join(f"M{x:.1f} {y:.1f}h0" for x, y in points), "dot", one.tone))
    return Chart(
        title=title,
        summary=summary,
        unit=unit,
        grid=[Label(round(down(mark), 1), write(mark)) for mark in marks],
        ticks=[
            Label(round(100 * (mark - first) / ((last - first) or 1), 2), words.short(mark))
            for mark in _marks(first, last, most=5)
            if first <= mark <= last
        ]
        if len(steps) > 1
        else [Label(50, words.short(first))],
        shapes=[shape for shape in shapes if shape.path],
        legend=_legend(series),
        places=[round(x / 10, 2) for x in xs],
        head=[what, *(one.name for one in series)],
        rows=[
            [words.number(step), *(_cell(one.values[number], _exact) for one in series)]
            for number, step in enumerate(steps)
        ],
    )


def spark(counts: Sequence[float], height: int = 26) -> str:
    """The path of a small histogram for a cell of a table."""
    top = max(counts, default=0)
    if not top:
        return ""
    return _bars([0.0] * len(counts), list(counts), top=top, height=height, width=WIDTH / len(counts), head=2)


def time_ticks(times: Times, most: int = 5) -> list[Label]:
    length = times.end - times.start
    days = 86400 * max(1, -(-length // (86400 * most)))
    step = next((step for step in TICKS_S if length / step <= most), days)
    form = "%b %d" if step >= 86400 else "%d. %H:%M" if length > 86400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    first = math.ceil(times.start / step) * step
    moments = [first + number * step for number in range(int((times.end - first) // step) + 1)]
    return [Label(round(100 * times.part(at), 2), time.strftime(form, time.gmtime(at))) for at in moments]


def tone(number: int) -> str:
    return f"t{number % TONES}"


def _legend(series: Sequence[Series]) -> list[tuple[str, str]]:
    return [(one.tone, one.name) for one in series] if len(series) > 1 else []


def _stack(values: Iterable[Sequence[float | None]]) -> list[list[float]]:
    sums: list[list[float]] = []
    for some in values:
        below = sums[-1] if sums else [0.0] * len(some)
        sums.append([under + (value or 0) for under, value in zip(below, some, strict=True)])
    return sums


def _scale(most: float, height: int, write: Number) -> tuple[float, list[Label]]:
    """The value at the top, and a grid line for each mark."""
    marks = _marks(0, most or 1)
    top = marks[-1]
    return top, [Label(round(_down(mark, top, height), 1), write(mark)) for mark in marks if mark or not most]


def _marks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers, evenly apart, the first at most `low`, the last at least `high`."""
    span = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / most))
    step = next(size * many for many in (1, 2, 2.5, 5, 10, 20) if span / (size * many) <= most)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _down(value: float, top: float, height: int, head: int = HEAD) -> float:
    return head + (height - head) * (1 - value / top)


def _area(xs: Sequence[float], low: Sequence[float], high: Sequence[float], top: float, height: int) -> str:
    """Flat to both edges, since the values are of bins and stand in their middles."""
    over = [(0.0, high[0]), *zip(xs, high, strict=True), (float(WIDTH), high[-1])]
    under = [(0.0, low[0]), *zip(xs, low, strict=True), (float(WIDTH), low[-1])]
    points = [*over, *reversed(under)]
    return "M" + "L".join(f"{x:.1f} {_down(value, top, height):.1f}" for x, value in points) + "Z"


def _steps(count: int, values: Sequence[float | None], top: float, height: int) -> str:
    width, path, is_on = WIDTH / count, "", False
    for number, value in enumerate(values):
        if value is None:
            is_on = False
            continue
        y = _down(value, top, height)
        path += f"{'L' if is_on else 'M'}{number * width:.1f} {y:.1f}H{(number + 1) * width:.1f}"
        is_on = True
    return path


def _bars(
    low: Sequence[float], high: Sequence[float], *, top: float, height: int, width: float, head: int = HEAD
) -> str:
    gap = 0.12 * width
    return "".join(
        f"M{number * width + gap:.1f} {_down(over, top, height, head):.1f}h{width - 2 * gap:.1f}"
        f"V{_down(under, top, height, head):.1f}h-{width - 2 * gap:.1f}z"
        for number, (under, over) in enumerate(zip(low, high, strict=True))
        if over > under
    )


def _cell(value: float | None, write: Number) -> str:
    return "–" if value is None else write(value)


def _exact(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
