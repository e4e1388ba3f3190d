"""Figures as a person reads them: no more digits than they are worth."""

from __future__ import annotations

from typing import Any


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
    """`0.4 MB`, `4 MB`, `1.3 GB`, `1,204 GB`."""
    unit, held = ("GB", num_bytes / 1e9) if num_bytes >= 1e9 else ("MB", num_bytes / 1e6)
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
