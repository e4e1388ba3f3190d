"""What a look found: how bad it is, what is there, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from draftfleet.errors import DraftfleetError, ServerError
from draftfleet.redaction import redact

Level = Literal["fault", "warning", "ok", "skipped"]

WORST_FIRST: tuple[Level, ...] = ("fault", "warning", "skipped", "ok")

_VERBS = (
    "serve|start|set|name|use|update|correct|compare|write|put|make|mend|restore|point|run|give|begin|leave|wait|choose"
    "|allow"
)
_ADVICE = re.compile(rf"[.:;] (?=(?:{_VERBS})\b)", re.I)
"""Errors of the house say what happened, then what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject` is what was looked at, `check` which question was asked of it. `values` are for programs."""

    level: Level
    check: str
    found: str
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    subject: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"found": redact(self.found), "fix": redact(self.fix)}


def ok(check: str, found: str, **values: Any) -> Finding:
    return Finding("ok", check, found, values=values)


def skipped(check: str, why: str) -> Finding:
    return Finding("skipped", check, why)


def warning(check: str, found: str, fix: str, **values: Any) -> Finding:
    return Finding("warning", check, found, fix, values)


def fault(check: str, found: str, fix: str, **values: Any) -> Finding:
    return Finding("fault", check, found, fix, values)


def of_error(check: str, error: DraftfleetError, fix: str = "", level: Level = "fault") -> Finding:
    """What an error says happened is the finding, what it says to do the fix."""
    text = error.summary if isinstance(error, ServerError) else str(error)
    found, advice = told_apart(text)
    return Finding(level, check, found, fix or advice)


def told_apart(text: str) -> tuple[str, str]:
    """What happened, and what to do, of a text that says both in this order."""
    found, *advice = _ADVICE.split(text.strip(), maxsplit=1)
    return found.rstrip("."), advice[0] if advice else ""
