"""The pictures of the race, for the docs: light, small, readable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

COLOURS = {"draftfleet": "#1b6ca8", "speculators": "#c8553d", "eagle3": "#1b6ca8", "dflash": "#2f8f5b"}
TITLES = {"eagle3": "EAGLE-3, k = 3", "dflash": "DFlash, blocks of 8"}

Point = tuple[str, float, float]
"""Side, training tokens, acceptance length."""

Size = tuple[str, int, float, int]
"""Algorithm, size, seconds, bytes."""


def acceptance(file: Path, points: dict[str, list[Point]], most: dict[str, int]) -> None:
    """Acceptance length against training tokens, an axis for each algorithm."""
    figure, axes = plt.subplots(1, len(points), figsize=(8, 3.2), constrained_layout=True, squeeze=False)
    for axis, (algorithm, found) in zip(axes[0], points.items(), strict=True):
        for side in dict.fromkeys(side for side, _, _ in found):
            own = sorted((tokens / 1000, length) for one, tokens, length in found if one == side)
            axis.plot(*zip(*own, strict=True), marker="o", markersize=3, color=COLOURS[side], label=side)
        axis.set_title(f"{TITLES[algorithm]}: at most {most[algorithm]}", fontsize=10)
        axis.set_xlabel("training tokens, thousands")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=1)
        _tidy(axis)
    axes[0][0].set_ylabel("acceptance length, held out")
    axes[0][-1].legend(frameon=False, loc="lower right")
    _write(figure, file)


def growth(file: Path, sizes: dict[str, Sequence[Size]]) -> None:
    """Seconds of a step above, peak memory below, an axis for each kind of size."""
    figure, axes = plt.subplots(2, len(sizes), figsize=(8, 5.2), constrained_layout=True, sharex="col", squeeze=False)
    for column, (what, found) in enumerate(sizes.items()):
        for row, (part, scale) in enumerate(((2, 1.0), (3, 2.0**-20))):
            axis = axes[row][column]
            for algorithm in dict.fromkeys(one[0] for one in found):
                own = sorted((one[1], one[part] * scale) for one in found if one[0] == algorithm)
                x, y = zip(*own, strict=True)
                axis.loglog(x, y, marker="o", markersize=3, color=COLOURS[algorithm], label=algorithm)
                axis.loglog(x, [y[0] * size / x[0] for size in x], color="#bbbbbb", linewidth=0.8, linestyle="--")
            _tidy(axis)
        marks = sorted({one[1] for one in found})
        axes[1][column].set_xlabel(what)
        axes[1][column].xaxis.set_minor_formatter(NullFormatter())
        axes[1][column].set_xticks(marks, [f"{mark:,}" for mark in marks], fontsize=8)
    axes[0][0].set_ylabel("CPU seconds of a step")
    axes[1][0].set_ylabel("peak memory, MB")
    axes[0][0].legend(frameon=False, loc="upper left")
    _write(figure, file)


def _tidy(axis: Axes) -> None:
    axis.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _write(figure: plt.Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)
