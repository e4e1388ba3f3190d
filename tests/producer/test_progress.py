"""Where there is no terminal, the log says how far it is."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet.settings import Producer
from producer import progress
from producer.reading import Reading
from producer.sources import open_source


def test_the_log_tells_the_rate_the_share_by_bytes_and_the_time_left(
    knobs: Callable[..., Producer],
    write_jsonl: Callable[..., Path],
    until: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "TELL_S", 0.05)
    path = write_jsonl({"prompt": f"What is {number:05d} times two?"} for number in range(20_000))
    source = open_source(knobs(path))
    reading = Reading(source, knobs(path))
    lines = iter(reading)

    with caplog.at_level(logging.INFO), progress.watched(source, reading, enabled=False):
        for _ in range(10_000):
            next(lines)
        until(lambda: "lines=10000 " in caplog.text, what="a log line")
    said = next(message for message in caplog.messages if "lines=10000 " in message)

    fields = dict(re.findall(r"(\w+)=(\S+)", said))
    assert 45 < float(fields["percent"]) < 55
    assert float(fields["lines_per_s"]) > 0
    assert float(fields["left_s"]) > 0
