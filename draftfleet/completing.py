"""What a shell completes beside verbs and flags: names that the settings lead to, as far as they are found at once.

A name that cannot be had is no error: whoever presses Tab is told nothing, and types it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from draftfleet.settings import Settings

PRESET = "preset:"


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of runs in the storage."""
    from draftfleet.storage import open_storage  # noqa: PLC0415  only at Tab

    with suppress(Exception):
        storage = open_storage(_settings(ctx).storage)
        names = _beginning(incomplete, storage.folders())
        return [name for name in names if storage.exists(f"{name}/run.json")]
    return []


def drafters(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of drafters of the run that is named."""
    from draftfleet.storage import open_storage  # noqa: PLC0415  only at Tab

    with suppress(Exception):
        settings = _settings(ctx)
        return _beginning(incomplete, open_storage(settings.storage).folders(f"{settings.run}/drafters"))
    return []


def nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Hosts and processes of live workers."""
    from draftfleet import live  # noqa: PLC0415  only at Tab
    from draftfleet.queue import connect  # noqa: PLC0415

    with suppress(Exception):
        reports = live.read(connect(_settings(ctx)))
        return _beginning(incomplete, {name for report in reports for name in (report.host, report.process)})
    return []


def data(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of data sets that are known by name. Nothing else is named, so that the shell completes files.

    Of `preset:gs` bash makes three words, `preset`, `:` and `gs`, of which it completes the last one.
    """
    from draftfleet.roles import role  # noqa: PLC0415  only at Tab

    with suppress(Exception):
        words = [*(ctx.params.get("data") or []), incomplete]
        names = role("preset names")(_settings(ctx))
        if words[-2:] == ["preset", ":"]:
            return names
        if words[-3:-1] == ["preset", ":"]:
            return _beginning(incomplete, names)
        if incomplete and (PRESET.startswith(incomplete) or incomplete.startswith(PRESET)):
            return _beginning(incomplete, (PRESET + name for name in names))
    return []


def _settings(ctx: typer.Context) -> Settings:
    """As far as the line says already. Raises SettingsError."""
    from draftfleet.settings import load  # noqa: PLC0415  only at Tab

    given = {"storage.url": ctx.params.get("storage"), "run": ctx.params.get("run")}
    return load(ctx.params.get("config"), {path: value for path, value in given.items() if value})


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete) and not name.startswith("."))
