"""One event a line, past tense, then fields: `batch done run=qwen3 batch=train-000123 rows=64 seconds=84.2`.

No prompt text and no key above DEBUG. Beside standard error the lines may go to a file that is rotated, and be JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from pathlib import Path
from typing import TextIO

from draftfleet import redaction
from draftfleet.damper import Damper
from draftfleet.logfile import RotatingFile, is_standard_error

log = logging.getLogger(__name__)

PACKAGES = ("draftfleet", "producer", "workers", "trainer")
MEGABYTE = 1_000_000
LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class Event(str):
    """A line as people read it; `text` and `fields` are what it was made of."""

    __slots__ = ("fields", "text")
    text: str
    fields: dict[str, object]


def setup(
    level: str = "INFO", *, as_json: bool = False, file: Path | None = None, max_mb: float = 100, keep: int = 5
) -> None:
    """Send this package's events to standard error and to `file`. Other libraries speak from WARNING on.

    May be called again, as after a reload of the settings. Raises SettingsError if another process writes that file.
    """
    handlers: list[logging.Handler] = []
    if file is not None:
        rotating = _open_already(file) or RotatingFile(file)
        rotating.maxBytes, rotating.backupCount = int(max_mb * MEGABYTE), keep
        rotating.setFormatter(_Json() if as_json else _Text(LINE))
        handlers.append(rotating)
    if file is None or not is_standard_error(file):
        console = _ToStandardError()
        console.setFormatter(_Json() if as_json else _Text(LINE, "%H:%M:%S"))
        handlers.append(console)
    _replace_handlers(handlers, [_Least(level), Damper()])
    for name in PACKAGES:
        logging.getLogger(name).setLevel(min(logging.getLevelNamesMapping()[level], logging.INFO))
    threading.excepthook = _thread_ended


def _thread_ended(what: threading.ExceptHookArgs) -> None:
    """Through the formatter, as any event: Python itself would print what the exception quotes."""
    if what.exc_type is not SystemExit:
        error = what.exc_value or what.exc_type()
        log.error(event("thread ended", thread=what.thread and what.thread.name, error=repr(error)), exc_info=error)


def event(text: str, **fields: object) -> Event:
    """`event("batch done", rows=64)` is `batch done rows=64`. Floats get three digits, text with spaces is quoted."""
    said = Event(" ".join([text, *(f"{key}={_field(value)}" for key, value in fields.items())]))
    said.text, said.fields = text, fields
    return said


def _open_already(file: Path) -> RotatingFile | None:
    """Two handlers on one file would rotate it against each other."""
    path = str(file.absolute())
    held = (one for one in logging.root.handlers if isinstance(one, RotatingFile) and one.baseFilename == path)
    return next(held, None)


def _replace_handlers(handlers: list[logging.Handler], filters: list[logging.Filter]) -> None:
    for old in logging.root.handlers[:]:
        logging.root.removeHandler(old)
        if old not in handlers:
            old.close()
    for handler in handlers:
        handler.filters = [*filters]
        logging.root.addHandler(handler)
    logging.root.setLevel(logging.WARNING)


class _Least(logging.Filter):
    """Our own events below a level are not said. They are made all the same: a worker's history keeps some of them."""

    def __init__(self, level: str) -> None:
        super().__init__()
        self._level = logging.getLevelNamesMapping()[level]

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self._level or record.name.partition(".")[0] not in PACKAGES


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Looks it up for each line: while a progress bar stands there, the bar puts the line above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Text(redaction.Formatter):
    """With the number of lines that the damper left out since the last one of its kind."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        unsaid = getattr(record, "unsaid", 0)
        return super().formatMessage(record) + (f" unsaid={unsaid}" if unsaid else "")


class _Json(logging.Formatter):
    """One object a line: time in seconds since the epoch, level, logger, event, then the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        said = record.msg
        line: dict[str, object] = {"time": round(record.created, 3), "level": record.levelname, "logger": record.name}
        if isinstance(said, Event):
            line["event"] = said.text
            line |= {key: value for key, value in said.fields.items() if key not in line}
        else:
            line["event"] = record.getMessage()
        if unsaid := getattr(record, "unsaid", 0):
            line["unsaid"] = unsaid
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return redaction.redact(json.dumps(line, ensure_ascii=False, default=str))


def _field(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    text = str(value)
    if not text.isprintable():  # a control character would act on the terminal that shows it
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
