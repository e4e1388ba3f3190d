"""What the servers serve, asked before a run begins: which are there, one model for all of them, and whether it fits.

The looks are the doctor's. What they find wrong is an error here, but for servers that are away while others are there:
a worker takes them up when they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftfleet.errors import Mismatch, NotReady, SettingsError
from draftfleet.settings import Settings
from workers.dialects.openai import model_entries
from workers.doctor import servers
from workers.doctor.case import Case, Seen
from workers.doctor.findings import Finding

LOOK_S = 2.0
SAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """The one model that all servers which are `ready` serve, and what a person should know of them."""

    model: str
    ready: list[str]
    warnings: list[str]


def served(settings: Settings, *, wait_s: float, tell: Callable[[str], object]) -> Served:
    """Look until one server is there, for `wait_s` at most; `tell` gets a line now and then meanwhile.

    Raises SettingsError, NotReady, or Mismatch where a server serves something else than is asked for.
    """
    case, found = _first_answer(settings, wait_s, tell)
    if not settings.target.model:
        model = _common(case.seen, settings.target.path)
        target = settings.target.model_copy(update={"model": model})
        settings = settings.model_copy(update={"target": target})
        case, found = _look(settings)
    if wrong := [one for one in found if one.level == "fault" and one.check != "ready"]:
        raise Mismatch("\n".join(map(_said, wrong)))
    warnings = [one for one in found if one.level in ("fault", "warning")]
    return Served(settings.model, [seen.url for seen in case.ready], list(map(_said, warnings)))


def _first_answer(settings: Settings, wait_s: float, tell: Callable[[str], object]) -> tuple[Case, list[Finding]]:
    deadline, say_at = time.monotonic() + wait_s, time.monotonic()
    while True:
        case, found = _look(settings)
        if case.seen:
            return case, found
        faults = [one for one in found if one.level in ("fault", "warning")]
        if not faults:
            raise SettingsError("no server is named: --servers http://HOST:PORT,... or http://HOST:8000-8007.")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            waits = f"None came within {wait_s:g} s" if wait_s else "`--wait-servers 30m` waits for one that is loading"
            raise NotReady("\n".join(["no server is there:", *(f"  {_said(one)}" for one in faults), f"{waits}."]))
        if time.monotonic() >= say_at:
            say_at = time.monotonic() + SAY_S
            tell(f"waiting for a server, {left_s / 60:.0f} min more at most: {'; '.join(one.found for one in faults)}")
        time.sleep(min(LOOK_S, left_s))


def _look(settings: Settings) -> tuple[Case, list[Finding]]:
    case = Case(settings=settings)
    return case, list(servers.look(case))


def _common(seen: Sequence[Seen], path: str) -> str:
    """The model that all of them serve. An adapter is none: it has a parent."""
    names = [[str(entry["id"]) for entry in model_entries(one.models) if not entry.get("parent")] for one in seen]
    common = [name for name in names[0] if all(name in others for others in names)]
    listed = "\n".join(
        f"  {one.url} serves {', '.join(some) or 'no model'}" for one, some in zip(seen, names, strict=True)
    )
    if path in common:
        return path
    if not common:
        raise Mismatch(f"the servers do not serve one model:\n{listed}\nName those of one model with --servers.")
    if len(common) > 1:
        raise SettingsError(f"the servers serve several models:\n{listed}\nSay which one to ask with --model.")
    return common[0]


def _said(finding: Finding) -> str:
    return f"{finding.found}: {finding.fix}" if finding.fix else finding.found
