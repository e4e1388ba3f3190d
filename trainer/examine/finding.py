"""What a look at the target says, in the shape of the doctor's findings."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Level = Literal["fault", "warning", "ok", "skipped"]

Finding = tuple[Level, str, str, str, dict[str, Any]]
"""Level, check, what was found, what to do, and the numbers behind it."""


class Found(NamedTuple):
    """A finding by its names."""

    level: Level
    check: str
    found: str
    fix: str = ""
    values: dict[str, Any] = {}  # noqa: RUF012 - a tuple's fields are not assigned to
