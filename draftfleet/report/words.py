"""Numbers and strange characters as a person reads them."""

from __future__ import annotations

import re
import time
from typing import Any

from markupsafe import Markup

_STRANGE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""What acts on the text around it, or shows nothing: controls, directions, separators, halves of pairs."""


def shown(value: Any) -> Any:
    """Text with what cannot be seen as `⟨U+202E⟩`. Everything that the template writes goes through here."""
    return _STRANGE.sub(_named, value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _named(found: re.Match[str]) -> str:
    return f"⟨U+{ord(found[0]):04X}⟩"


def number(value: float | None, digits: int = 0) -> str:
    """`12,345`; a dash where nothing is known."""
    return "–" if value is None else f"{value:,.{digits}f}"


def short(value: float) -> str:
    """Three digits at most: `12.3k`, `4.5M`, `0.025`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def duration(seconds: float | None) -> str:
    """In the two largest units: `3 d 4 h`, `2 h 05 min`, `41 s`, `0.35 s`."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def moment(at: float) -> str:
    """`2026-12-01 14:05:09`, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def clipped(text: str, most: int) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
