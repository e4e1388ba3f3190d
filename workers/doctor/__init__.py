"""What would spoil a run, found before it starts: `draftfleet doctor`. One module per subject that is looked at."""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftfleet.errors import SettingsError
from draftfleet.settings import Settings
from workers.doctor import report
from workers.doctor.case import Asked, Case, FirstPrompts, Limits, Pins
from workers.doctor.examination import SUBJECTS, examine
from workers.doctor.findings import Finding, Level, skipped, told_apart

__all__ = ["Asked", "Case", "Finding", "Level", "Limits", "doctor", "examine", "exit_code"]


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
        case, findings = Case(settings=Settings.model_construct(run="?")), unreadable(settings)
    else:
        case = Case(settings=settings, file=file, first_prompts=first_prompts, pins=pins)
        with report.progress(enabled=progress) as on_change:
            findings = examine(case, on_change)
    seconds, code = time.monotonic() - begun, exit_code(findings, strict=strict)
    if as_json:
        print(report.as_json(case, findings, seconds=seconds, exit_code=code))
    else:
        report.show(case, findings, seconds=seconds, records=records)
    return code


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
