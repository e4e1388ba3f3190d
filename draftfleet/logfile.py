"""The log file of one process, rotated by its size."""

from __future__ import annotations

import fcntl
import io
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from draftfleet.errors import SettingsError

STANDARD = (1, 2)
"""Standard output and standard error."""


class RotatingFile(RotatingFileHandler):
    """Written by this process alone: a second one would rotate it under the first one's hands.

    Where standard output or error is this very file, as in the children of `draftfleet up`, it follows into the new
    file at each rotation, so that what Python or a library prints by itself stays with the log.
    Raises SettingsError if another process has it, or if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, encoding="utf-8")
        except BlockingIOError:
            raise SettingsError(
                f"logs.file = {str(path)!r} is written by another process: give each its own, for example "
                f"{str(path.with_name('{verb}-{pid}.log'))!r}."
            ) from None
        except OSError as error:
            raise SettingsError(f"logs.file = {str(path)!r} cannot be written: {error}.") from None

    def doRollover(self) -> None:
        following = [fd for fd in STANDARD if _is_same(fd, self.baseFilename)]
        super().doRollover()
        assert self.stream is not None  # opened by it
        for fd in following:
            os.dup2(self.stream.fileno(), fd)

    def _open(self) -> io.TextIOWrapper:
        stream = super()._open()
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            raise
        return stream


def is_standard_error(path: Path) -> bool:
    """Whether what is printed to standard error lands in this file anyway."""
    return _is_same(2, str(path))


def _is_same(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False
