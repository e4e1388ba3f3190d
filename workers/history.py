"""Keeps what `draftfleet report` tells of this node: a listener to the log, and files in the folders of its runs.

Everything is in the log already, so nothing else has to say it. What is kept are all warnings and errors, and the
states and decisions named below. It is small and bounded, and it never holds up work: lines wait in memory while the
storage is away, the oldest give way to newer ones, and a run has so many files of one process at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from draftfleet import history
from draftfleet.errors import StorageError
from draftfleet.history import LINES_PER_FILE, Noted
from draftfleet.logs import Event, event
from draftfleet.redaction import redact
from draftfleet.run_info import is_gone
from draftfleet.runs import Run

log = logging.getLogger(__name__)

FLUSH_S = 15.0
CLOSE_S = 5.0
"""How long the end of a node waits for its last lines to be put."""

ACTIVE_S = 600.0
"""What happens to the node belongs to the runs that it worked on within so many seconds."""

MOST_WAITING = 2_000
MOST_FILES = 40
"""Of one process and run: 20,000 lines, some 3 MB."""

LONGEST_VALUE = 300

KEPT = {
    "worker started", "worker draining", "worker drained", "settings reloaded", "drain ordered", "signal received",
    "storage reached again", "redis reached again", "server ready", "server removed", "concurrency changed",
    "run opened", "run paused", "run resumed", "run cancelled", "batch given back", "batch was done by another",
}  # fmt: skip
"""Said at INFO."""

COUNTED = {"row to be tried again", "row failed"}
"""Said of single rows: noted as one line per server and flush, with how many, and the error of the last."""

STATES = {
    "redis out of reach": "redis", "redis reached again": "redis", "worker paused": "storage",
    "storage reached again": "storage",
}  # fmt: skip
OF_SERVERS = {"server ready", "waiting for server", "server rests", "server left out", "server did not get ready"}
"""What the log says again and again as long as it lasts; noted once."""


@dataclass(slots=True)
class _File:
    """The files of one run. `noted` are the lines of the newest one; `after` is the number of the last event in it."""

    run: Run
    seen_at: float
    number: int = 0
    after: int = -1
    noted: list[Noted] = field(default_factory=list[Noted])


class Recorder(logging.Handler):
    """Begins to listen when it is made, until `close`."""

    def __init__(self, process: str) -> None:
        super().__init__(logging.INFO)
        self.process = process
        self._guard = threading.Lock()
        self._flushing = threading.Lock()
        self._events: deque[tuple[int, str, Noted]] = deque(maxlen=MOST_WAITING)
        self._next = 0
        self._states: dict[str, tuple[str, str]] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._examples: dict[tuple[str, str, str], str] = {}
        self._files: dict[str, _File] = {}
        self._loggers = [logging.getLogger(name) for name in ("draftfleet", "workers")]
        for logger in self._loggers:
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """From any thread, the event loop's included: a few microseconds."""
        said = record.msg
        if not isinstance(said, Event) or (record.levelno < logging.WARNING and said.text not in KEPT | COUNTED):
            return
        fields = {name: _plain(value) for name, value in said.fields.items()}
        run = str(fields.pop("run", ""))
        server = str(fields.get("server", ""))
        with self._guard:
            if said.text in COUNTED:
                key = said.text, run, server
                self._counts[key] += 1
                self._examples[key] = str(fields.get("error", ""))
                return
            subject = server if said.text in OF_SERVERS else STATES.get(said.text)
            state = said.text, str(fields.get("state", ""))
            if subject is not None and self._states.get(subject) == state:
                return
            if subject is not None:
                self._states[subject] = state
            self._note(run, Noted(at=record.created, event=said.text, process=self.process, fields=fields))

    def see(self, run: Run) -> None:
        """The node works on it now: what happens to the node belongs to it."""
        with self._guard:
            held = self._files.setdefault(run.run_id, _File(run, 0.0))
            held.seen_at = time.monotonic()

    def flush_to(self, runs: Iterable[Run]) -> bool:
        """A chore: put what is new into the folders of these runs, and of those that were seen lately.

        A storage that refuses is asked again next time. Returns False: Redis is not asked.
        """
        for run in runs:
            self.see(run)
        with self._flushing:
            with self._guard:
                self._settle_counts()
                events = list(self._events)
                since = time.monotonic() - ACTIVE_S
                files = [file for file in self._files.values() if file.seen_at >= since]
            for file in files:
                self._put(file, events)
        return False

    def end(self) -> None:
        """Put the last lines, if the storage takes them in time, and listen no more."""
        last = threading.Thread(target=self.flush_to, args=[[]], name="history", daemon=True)
        last.start()
        last.join(CLOSE_S)
        self.close()

    def close(self) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
        super().close()

    def _note(self, run: str, noted: Noted) -> None:
        self._events.append((self._next, run, noted))
        self._next += 1

    def _settle_counts(self) -> None:
        for (text, run, server), rows in self._counts.items():
            fields = {"server": server, "rows": rows, "last": self._examples[text, run, server]}
            name = "rows tried again" if text == "row to be tried again" else "rows failed"
            self._note(run, Noted(at=time.time(), event=name, process=self.process, fields=fields))
        self._counts.clear()
        self._examples.clear()

    def _put(self, file: _File, events: list[tuple[int, str, Noted]]) -> None:
        """Of a run that was deleted meanwhile nothing is put: its folder would be there again."""
        new = [(number, noted) for number, run, noted in events if number > file.after and run in ("", file.run.name)]
        try:
            if new and is_gone(file.run.storage, file.run.name, file.run.run_id):
                return
            while new and file.number < MOST_FILES:
                room = LINES_PER_FILE - len(file.noted)
                noted = [*file.noted, *(one for _, one in new[:room])]
                history.put(file.run, self.process, file.number, noted)
                file.noted, file.after = noted, new[:room][-1][0]
                new = new[room:]
                if len(noted) == LINES_PER_FILE:
                    file.number, file.noted = file.number + 1, []
        except (StorageError, OSError) as error:
            log.debug(event("history not written", run=file.run.name, error=str(error)))


def _plain(value: object) -> object:
    """A number as it is, anything else as text without secrets."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 3)
    return redact(str(value))[:LONGEST_VALUE]
