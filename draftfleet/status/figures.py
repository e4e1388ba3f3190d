"""Figures as a person reads them: no more digits than they are worth."""

from __future__ import annotations

from typing import Any

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def seconds(value: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `4 d 6 h`."""
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    minutes = round(value / 60)
    if minutes < 120:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(value / 3600)
    return f"{hours // 24} d {hours % 24} h"


def size(num_bytes: float) -> str:
    """`12 kB`, `4.2 MB`, `1.3 GB`, `1,204 GB`."""
    unit, bytes_of = next(one for one in UNITS if num_bytes >= one[1] or one is UNITS[-1])
    held = num_bytes / bytes_of
    return f"{held:,.{int(held < 10)}f} {unit}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def knob(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def address(url: str) -> str:
    """Of a server, without what all have."""
    return url.removeprefix("http://")
