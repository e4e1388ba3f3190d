"""What happened to the nodes of a run: limits that changed, servers that came and went, starts, drains and faults.

    RUN/history/PROCESS-000000.jsonl    of one worker process, put anew as it grows; -000001 follows after 500 lines
    {"at":1764516000.123,"event":"concurrency changed","server":"http://127.0.0.1:8000","limit":24,"was":16,"because":".."}

Nothing depends on it: it is for `draftfleet report`. The words are those of the log. A run that an older version worked
on has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from draftfleet.errors import StorageError
from draftfleet.runs import Run
from draftfleet.shards import lines

FOLDER = "history"
LINES_PER_FILE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """One event. `fields` are plain values, as the log line had them."""

    at: float
    event: str
    process: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_line(self) -> str:
        said = {"at": round(self.at, 3), "event": self.event} | self.fields
        return json.dumps(said, ensure_ascii=False, separators=(",", ":"), default=str) + "\n"

    @classmethod
    def from_line(cls, line: str, process: str) -> Self | None:
        """None if it is damaged."""
        try:
            said: dict[str, Any] = json.loads(line)
            return cls(at=float(said.pop("at")), event=str(said.pop("event")), process=process, fields=said)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(slots=True)
class History:
    """In order of time. `damaged` lines and files could not be read."""

    events: list[Noted] = field(default_factory=list[Noted])
    damaged: int = 0

    @property
    def is_there(self) -> bool:
        return bool(self.events)


def put(run: Run, process: str, number: int, noted: Iterable[Noted]) -> None:
    """Put one file of a process, or put it anew. Raises StorageUnwritable."""
    text = "".join(one.to_line() for one in noted)
    run.storage.put(f"{run.name}/{FOLDER}/{process}-{number:06d}.jsonl", text.encode(errors="replace"))


def read(run: Run) -> History:
    found = History()
    for name in sorted(run.storage.list(f"{run.name}/{FOLDER}")):
        if not name.endswith(".jsonl"):
            continue
        try:
            raw = run.storage.read(f"{run.name}/{FOLDER}/{name}")
        except (FileNotFoundError, StorageError):
            found.damaged += 1
            continue
        process = name.removesuffix(".jsonl").rpartition("-")[0]
        read_lines = [Noted.from_line(line, process) for line in lines(raw.decode(errors="replace"))]
        found.events += [one for one in read_lines if one is not None]
        found.damaged += sum(one is None for one in read_lines)
    found.events.sort(key=lambda one: one.at)
    return found


def host_of(process: str) -> str:
    """Processes are called HOST-PID-RANDOM."""
    return process.rsplit("-", 2)[0]
