"""One event a line, readable by a person and by `grep`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftfleet.logs import event


def test_an_event_is_its_words_and_its_fields() -> None:
    line = event("batch done", run="qwen3", batch="train-000123", rows=64, seconds=84.23, rate=0.01234, failed=0)

    assert line == "batch done run=qwen3 batch=train-000123 rows=64 seconds=84.2 rate=0.0123 failed=0"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two words", '"two words"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('a"b', '"a\\"b"'),
        ("two\nlines", '"two\\nlines"'),
        (1234.5, "1234"),
        (None, "None"),
    ],
)
def test_a_field_stays_on_its_line_and_can_be_told_from_the_next(value: object, shown: str) -> None:
    assert event("x", field=value) == f"x field={shown}"


def test_our_events_are_on_stderr_and_other_libraries_speak_from_warning_on() -> None:
    code = (
        "import logging; from draftfleet import logs; logs.setup()\n"
        "for name in ('workers.app', 'celery'):\n"
        "    for level in ('debug', 'info', 'warning'):\n"
        "        getattr(logging.getLogger(name), level)('%s %s', name, level)\n"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    said = [line.split(": ", 1)[1] for line in result.stderr.splitlines()]
    assert said == ["workers.app info", "workers.app warning", "celery warning"]
    assert result.stdout == ""
