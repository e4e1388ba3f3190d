"""What the verbs of the command line share."""

from __future__ import annotations

import sys

from draftfleet.roles import ROLES, role

__all__ = ["ROLES", "role", "shows_bars"]


def shows_bars(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress
