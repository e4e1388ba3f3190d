"""The folder of this user on this machine, for what holds as long as processes run: locks and pulses."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from draftfleet.errors import RunError


def folder() -> Path:
    """`draftfleet` in XDG_RUNTIME_DIR, where that can be written; else `draftfleet-UID` among the temporary files."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "draftfleet"
    return Path(tempfile.gettempdir()) / f"draftfleet-{os.getuid()}"


def prepare(folder: Path) -> None:
    """Make it. Its name in /tmp can be guessed: what another user has put there is not to be written through."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunError(
            f"{folder}, where processes keep their locks, is no folder of this user: remove it, or set "
            "XDG_RUNTIME_DIR to a folder of your own."
        )
