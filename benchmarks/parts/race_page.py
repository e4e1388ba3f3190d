"""The tables and pictures of the race, from what has been measured by now."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from parts import pictures
from parts.race_profile import CLASSES

SIDES = ("draftfleet", "speculators")
MOST = {"eagle3": 4, "dflash": 8}
"""Tokens that a pass of the target can keep: the draft and its own."""

NORMAL_95 = 1.96

Row = dict[str, Any]


def tables(rows: list[Row]) -> str:
    """Markdown: what is not measured yet is left out."""
    parts = {
        "Recipes, on the tuning prompts": _tuning(rows),
        "A step, taken in turns": _steps(rows),
        "Whole trainings": _trainings(rows),
        "Held-out acceptance in vLLM": _acceptance(rows),
        "Ours less theirs, group by group of judged prompts": _difference(rows),
        "End to end in vLLM": _speed(rows),
        "Where the time of a step goes": _profile(rows),
    }
    return "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in parts.items() if len(lines) > 2)


def picture(rows: list[Row], file: Path) -> None:
    """Acceptance against tokens, if drafters on the way have been judged."""
    points = {
        algorithm: [
            (row["side"], float(row["trained_tokens"]), float(row["acceptance"]))
            for row in _of(rows, part="curve", algorithm=algorithm)
        ]
        for algorithm in MOST
    }
    points = {algorithm: found for algorithm, found in points.items() if len(found) > len(SIDES)}
    if points:
        pictures.acceptance(file, points, MOST)


def _of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def _steps(rows: list[Row]) -> list[str]:
    lines = [
        "| algorithm, optimizer | tokens/CPU s | theirs | CPU ms/step | theirs | ratio of pairs | peak, MB | theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in _of(rows, part="steps"):
        ours, theirs = (row["sides"][side] for side in SIDES)
        lines.append(
            f"| {row['algorithm']}, {row['optimizer']} | {_rate(ours):,.0f} | {_rate(theirs):,.0f} "
            f"| {1000 * ours['cpu_s'] / row['steps']:.0f} | {1000 * theirs['cpu_s'] / row['steps']:.0f} "
            f"| **{_spread(row['ratios']['cpu_s'])}** "
            f"| {ours['peak_bytes'] / 2**20:.0f} | {theirs['peak_bytes'] / 2**20:.0f} |"
        )
    return lines


def _tuning(rows: list[Row]) -> list[str]:
    lines = ["| algorithm, trainer | recipe | acceptance length |", "|---|---|---|"]
    for algorithm in MOST:
        for side in SIDES:
            tuned = _of(rows, part="tune", algorithm=algorithm, side=side)
            best = max((row["acceptance"] for row in tuned), default=0.0)
            for row in tuned:
                length = f"{row['acceptance']:.3f}"
                length = f"**{length}**" if row["acceptance"] == best else length
                lines.append(f"| {algorithm}, {side} | {row['recipe']} | {length} |")
    return lines


def _trainings(rows: list[Row]) -> list[str]:
    lines = ["| algorithm, trainer | seeds | tokens | tokens/CPU s, mean | peak, MB |", "|---|---|---|---|---|"]
    for algorithm in MOST:
        for side in SIDES:
            recipes = {row["recipe"] for row in _of(rows, part="judge", algorithm=algorithm, side=side)}
            trained = [
                row
                for row in _of(rows, part="train", algorithm=algorithm, side=side)
                if row["recipe"] in recipes
            ]  # fmt: skip
            if trained:
                rate = statistics.mean(map(_rate, trained))
                peak = max(row["peak_bytes"] for row in trained) / 2**20
                tokens = min(row["tokens"] for row in trained)
                lines.append(f"| {algorithm}, {side} | {len(trained)} | {tokens:,} | {rate:,.0f} | {peak:.0f} |")
    return lines


def _acceptance(rows: list[Row]) -> list[str]:
    lines = ["| algorithm, of at most | trainer | mean | by seed | tokens |", "|---|---|---|---|---|"]
    for algorithm, most in MOST.items():
        for side in SIDES:
            judged = sorted(_of(rows, part="judge", algorithm=algorithm, side=side), key=lambda row: row["seed"])
            if judged:
                lengths = [row["acceptance"] for row in judged]
                by_seed = ", ".join(f"{length:.3f}" for length in lengths)
                tokens = min(row["trained_tokens"] for row in judged)
                lines.append(
                    f"| {algorithm}, {most} | {side} | **{statistics.mean(lengths):.3f}** | {by_seed} | {tokens:,} |"
                )
    return lines


def _difference(rows: list[Row]) -> list[str]:
    """Of the means over seeds, and where it lies with 95 %, by leaving out one group after the other (jackknife)."""
    lines = ["| algorithm | difference | 95 % | groups |", "|---|---|---|---|"]
    for algorithm in MOST:
        sides = [_of(rows, part="judge", algorithm=algorithm, side=side) for side in SIDES]
        if not all(sides):
            continue
        num_groups = len(sides[0][0]["drafts"])
        whole, *others = [
            _mean_without(sides[0], left_out) - _mean_without(sides[1], left_out)
            for left_out in (None, *range(num_groups))
        ]
        error = math.sqrt((num_groups - 1) / num_groups * sum((one - statistics.mean(others)) ** 2 for one in others))
        reach = NORMAL_95 * error
        lines.append(f"| {algorithm} | {whole:+.3f} | {whole - reach:+.3f} to {whole + reach:+.3f} | {num_groups} |")
    return lines


def _mean_without(judged: list[Row], left_out: int | None) -> float:
    """Acceptance length, mean of the seeds, over all groups of prompts but one."""
    lengths: list[float] = []
    for row in judged:
        drafts, accepted = (
            sum(count for group, count in enumerate(row[name]) if group != left_out) for name in ("drafts", "accepted")
        )
        lengths.append(1 + accepted / drafts)
    return statistics.mean(lengths)


def _speed(rows: list[Row]) -> list[str]:
    lines = [
        "| algorithm | served | one request, tokens/s | | tokens/CPU s | | eight, tokens/s | | tokens/CPU s | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in _of(rows, part="speed"):
        medians = {
            who: [statistics.median(rates[clock]) for rates in by_concurrency.values() for clock in ("wall", "cpu")]
            for who, by_concurrency in row["tokens_per_s"].items()
        }
        for who, rates in medians.items():
            cells = " | ".join(
                f"{rate:,.0f} | **x{rate / alone:.2f}**" for rate, alone in zip(rates, medians["alone"], strict=True)
            )
            lines.append(f"| {row['algorithm']} | {who} | {cells} |")
    return lines


def _profile(rows: list[Row]) -> list[str]:
    found = _of(rows, part="profile")
    if not found:
        return []
    lines = [
        "| | " + " | ".join(f"{row['algorithm']}, {row['side']}" for row in found) + " |",
        "|" + "---|" * (1 + len(found)),
    ]
    for name in CLASSES:
        lines.append(f"| {name} | {' | '.join(_share(row['ms'], name) for row in found)} |")
    return lines


def _share(ms: dict[str, float], name: str) -> str:
    return f"{100 * ms[name] / sum(ms.values()):.0f} %"


def _rate(side: dict[str, Any]) -> float:
    return side["tokens"] / side["cpu_s"]


def _spread(ratios: list[float]) -> str:
    """Median, and between which values nine pairs of ten lie."""
    low, *_, high = statistics.quantiles(ratios, n=20)
    return f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})"
