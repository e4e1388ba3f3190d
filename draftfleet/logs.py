"""One event a line, past tense, then fields: `batch done run=qwen3 batch=train-000123 rows=64 seconds=84.2`.

No prompt text and no key above DEBUG.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import TextIO

from draftfleet import redaction

log = logging.getLogger(__name__)


def setup(level: str = "INFO") -> None:
    """Send this package's events to standard error. Other libraries speak from WARNING on."""
    handler = _ToStandardError()
    handler.setFormatter(redaction.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("draftfleet", "producer", "workers", "trainer"):
        logging.getLogger(name).setLevel(level)
    threading.excepthook = _thread_ended


def _thread_ended(what: threading.ExceptHookArgs) -> None:
    """Through the formatter, as any event: Python itself would print what the exception quotes."""
    if what.exc_type is not SystemExit:
        error = what.exc_value or what.exc_type()
        log.error(event("thread ended", thread=what.thread and what.thread.name, error=repr(error)), exc_info=error)


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Looks it up for each line: while a progress bar stands there, the bar puts the line above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def event(text: str, **fields: object) -> str:
    """`event("batch done", rows=64)` is `batch done rows=64`. Floats get three digits, text with spaces is quoted."""
    return " ".join([text, *(f"{key}={_field(value)}" for key, value in fields.items())])


def _field(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    text = str(value)
    if not text.isprintable():  # a control character would act on the terminal that shows it
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
