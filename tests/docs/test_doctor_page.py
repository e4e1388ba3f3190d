"""The page on the doctor names what it looks at, and its example is what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftfleet.embedded import Embedded
from draftfleet.queue import connect
from draftfleet.settings import Settings
from draftfleet.testing.workers import changed
from workers.doctor import Case, Limits, examine
from workers.doctor.examination import SUBJECTS
from workers.doctor.report import show

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/doctor.md").read_text()


def test_the_table_has_a_row_for_each_subject_in_their_order() -> None:
    table = PAGE.partition("## What is looked at")[2].partition("\n## ")[0]

    assert tuple(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:]) == SUBJECTS


def test_the_example_is_what_it_says(
    settings: Settings, redis_server: Embedded, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = connect(settings)
    redis.config_set("maxmemory-policy", "allkeys-lru")
    redis.config_set("maxmemory", "100mb")
    case = Case(settings=changed(settings, producer__heldout=0), limits=Limits(ping_s=0.2))

    show(case, examine(case), seconds=1.0, records=False)

    example = re.findall(r"^(?:fault|warning) .*$", PAGE, re.MULTILINE)
    assert len(example) == 2
    assert set(example) <= set(capsys.readouterr().out.splitlines())
