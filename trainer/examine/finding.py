"""What a look at the target says, in the shape of the doctor's findings."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Level = Literal["fault", "warning", "ok", "skipped"]


class Found(NamedTuple):
    """`fix`: what to do; `values`: the numbers behind it."""

    level: Level
    check: str
    found: str
    fix: str = ""
    values: dict[str, Any] = {}  # noqa: RUF012 - a tuple's fields are not assigned to
