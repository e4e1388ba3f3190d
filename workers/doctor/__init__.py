"""What would spoil a run, found before it starts: `draftfleet doctor`. One module per subject that is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from draftfleet.errors import DraftfleetError, SettingsError
from draftfleet.settings import Settings
from workers.doctor import report
from workers.doctor.case import Asked, Case, FirstPrompts, Limits, Pins
from workers.doctor.examination import SUBJECTS, examine
from workers.doctor.findings import Finding, Level, of_error, skipped, told_apart

__all__ = [
    "Asked",
    "Case",
    "Finding",
    "Level",
    "Limits",
    "doctor",
    "doctor_of_target",
    "examine",
    "exit_code",
    "findings",
]


def doctor(
    settings: Settings | SettingsError,
    *,
    file: str = "",
    first_prompts: FirstPrompts | None = None,
    pins: Pins | None = None,
    as_json: bool = False,
    strict: bool = False,
    records: bool = False,
    progress: bool = False,
) -> int:
    """Look at everything, print what was found, and return the exit code. Settings that cannot be read are a finding.

    `file` is the settings file that was read; of `first_prompts` and `pins` the case says what they are.
    """
    begun = time.monotonic()
    if isinstance(settings, SettingsError):
        case, found = Case(settings=Settings.model_construct(run="?")), unreadable(settings)
    else:
        case = Case(settings=settings, file=file, first_prompts=first_prompts, pins=pins)
        with report.progress(enabled=progress) as on_change:
            found = examine(case, on_change)
    seconds, code = time.monotonic() - begun, exit_code(found, strict=strict)
    if as_json:
        print(report.as_json(case, found, seconds=seconds, exit_code=code))
    else:
        report.show(case, found, seconds=seconds, records=records)
    return code


TargetLook = Callable[[Settings], Iterable[dict[str, Any]]]
"""Findings on the target, as keyword arguments of `Finding`. The trainer's: a worker has no torch."""


def doctor_of_target(
    settings: Settings | SettingsError,
    *,
    look: TargetLook,
    as_json: bool = False,
    strict: bool = False,
    progress: bool = False,
) -> int:
    """Look at the target alone, in numbers, print what was found, and return the exit code."""
    begun = time.monotonic()
    found: list[Finding] = []
    if isinstance(settings, SettingsError):
        case = Case(settings=Settings.model_construct(run="?"))
        found = [one for one in unreadable(settings) if one.level == "fault"]
    else:
        case = Case(settings=settings)
        with report.progress(enabled=progress) as on_change:
            on_change(["target"])
            try:
                found += (Finding(**one, subject="target") for one in look(settings))
            except DraftfleetError as error:
                found.append(replace(of_error("look", error), subject="target"))
    seconds, code = time.monotonic() - begun, exit_code(found, strict=strict)
    if as_json:
        print(report.as_json(case, found, seconds=seconds, exit_code=code))
    else:
        report.show(case, found, seconds=seconds, records=False)
    return code


def findings(settings: Settings, *, first_prompts: FirstPrompts, pins: Pins) -> list[Finding]:
    """Look at everything and print nothing."""
    return examine(Case(settings=settings, first_prompts=first_prompts, pins=pins))


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """1 if there is a fault, with `strict` also if there is a warning; else 0."""
    bad = ("fault", "warning") if strict else ("fault",)
    return int(any(one.level in bad for one in findings))


def unreadable(error: SettingsError) -> list[Finding]:
    """Each line of the error, and that nothing else could be looked at."""
    found = [
        Finding("fault", "file", *told_apart(line), subject="settings") for line in str(error).splitlines() if line
    ]
    why = "the settings cannot be read"
    rest = (subject for subject in SUBJECTS if subject != "settings")
    return [*found, *(Finding("skipped", "look", skipped("look", why).found, subject=subject) for subject in rest)]
