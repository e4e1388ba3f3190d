"""`draftfleet logs`: what all parts of a fleet say, merged by time, followed across rotation."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from draftfleet.errors import SettingsError
from draftfleet.redaction import redact
from draftfleet.settings import Settings
from draftfleet.up import hold

LOOK_S = 0.3
KEPT = re.compile(r"\.\d+$")

TIMES = {
    re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3})"): "%Y-%m-%d %H:%M:%S",  # ours, and Celery's in brackets
    re.compile(r"(\d\d \w{3} \d{4} \d\d:\d\d:\d\d)\.(\d{3})"): "%d %b %Y %H:%M:%S",  # Valkey's
    re.compile(r"\[[A-Z] (\d{6} \d\d:\d\d:\d\d)() "): "%y%m%d %H:%M:%S",  # Flower's
}
"""Where the time stands at the beginning of a line, with its milliseconds; and its form."""

LOOKED_AT = 60
"""Characters of a line in which its time is looked for."""


def show(settings: Settings, name: str | None, *, follow: bool, count: int) -> int:
    """Print the last `count` lines, and with `follow` what comes after them. Raises SettingsError."""
    folder = Path(settings.queue.embedded_dir).absolute()
    holder, runs = hold.find(folder)
    logs = Path(holder.logs) if holder is not None and holder.logs else folder / "logs"
    logfiles = _files(folder, logs, name)
    width = max(len(one) for one in logfiles)
    if not runs:
        print(f"nothing runs in {folder}: these are the last words", file=sys.stderr)
    tails = {one: Tail(path) for one, path in logfiles.items()}
    _print(width, deque(merged({one: tail.last(count) for one, tail in tails.items()}), maxlen=count))
    while follow:
        for one, path in _files(folder, logs, name).items():  # a part may begin its log later
            tails.setdefault(one, Tail(path))
        _print(width, merged({one: tail.new() for one, tail in tails.items()}))
        time.sleep(LOOK_S)
    return 0


def _files(folder: Path, logs: Path, name: str | None) -> dict[str, Path]:
    """Of each part, the file that it writes now."""
    found = {path.stem: path for path in sorted(logs.glob("*.log"))}
    if (valkey := folder / "valkey.log").exists():
        found["valkey"] = valkey
    if name is None and found:
        return found
    if name is None or name not in found:
        there = ", ".join(found) or "none"
        which = "no logs" if name is None else f"no log of {name}"
        raise SettingsError(
            f"{folder} has {which}; there are: {there}. Another fleet's are found with --config FILE or "
            "--set queue.embedded_dir=FOLDER."
        )
    return {name: found[name]}


class Tail:
    """One log: its last lines, then what is added to it, also where it was put aside meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def last(self, count: int) -> list[str]:
        """The newest, over the files that were put aside as far as they are needed. From here on `new` goes on."""
        earlier = sorted(
            (path for path in self._path.parent.glob(f"{self._path.name}.*") if KEPT.search(path.name)),
            key=lambda path: int(path.suffix[1:]),
        )
        lines = self.new()[-count:] if count else (self.new(), [])[1]
        for path in earlier:
            if len(lines) >= count:
                break
            before = path.read_text(errors="replace").splitlines()
            lines = before[len(lines) - count :] + lines
        return lines

    def new(self) -> list[str]:
        """Whole lines since the last call."""
        lines: list[str] = []
        while True:
            if self._file is None and not self._open():
                return lines
            assert self._file is not None
            lines += self._read(self._file)
            if not self._was_put_aside(self._file):
                return lines
            lines += self._read(self._file)  # what was written between the two
            for path in reversed(self._put_aside_since(self._file)):
                lines += path.read_text(errors="replace").splitlines()
            self._file.close()
            self._file, self._rest = None, b""

    def _open(self) -> bool:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            return False
        return True

    def _read(self, file: BinaryIO) -> list[str]:
        whole, newline, self._rest = (self._rest + file.read()).rpartition(b"\n")
        return whole.decode(errors="replace").splitlines() if newline else []

    def _was_put_aside(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:  # just now: the new one comes
            return False

    def _put_aside_since(self, file: BinaryIO) -> list[Path]:
        """Files that came after this one and were put aside, too, the newest first."""
        found: list[Path] = []
        for number in itertools.count(1):
            path = self._path.with_name(f"{self._path.name}.{number}")
            try:
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return found
            except FileNotFoundError:
                return []
            found.append(path)
        raise AssertionError


def merged(lines: dict[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Name and line, by time. A line without one belongs to the line before it, as those of a traceback do."""
    timed = [_timed(name, some) for name, some in lines.items()]
    return ((name, line) for _, name, line in heapq.merge(*timed, key=lambda one: one[0]))


def _timed(name: str, lines: Iterable[str]) -> Iterator[tuple[float, str, str]]:
    at = 0.0
    for line in lines:
        at = max(at, time_of(line) or 0.0)
        yield at, name, line


def time_of(line: str) -> float | None:
    """Seconds since the epoch; None where the line has no time."""
    if line.startswith("{"):
        try:
            return float(json.loads(line)["time"])
        except (ValueError, KeyError, TypeError):
            return None
    for pattern, form in TIMES.items():
        if found := pattern.search(line[:LOOKED_AT]):
            try:
                return datetime.strptime(found[1], form).timestamp() + int(found[2] or 0) / 1000
            except ValueError:
                continue
    return None


def _print(width: int, lines: Iterable[tuple[str, str]]) -> None:
    for name, line in lines:
        print(f"{name:{width}}  {redact(line)}")
    sys.stdout.flush()
