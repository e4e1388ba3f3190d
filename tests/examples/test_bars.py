"""What the bars of the demo tell on terminals of two widths, and how they estimate."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from bars import Bars
from estimate import Estimate

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WORDS = "1,257 ok, 12 truncated, 3 failed, 1,220 tokens/s, and so on, and so on, and so on"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(width: int, words: str) -> list[str]:
    """The last lines on a terminal: a stage of 1,664 rows of which 5 are done a second, and one that has not begun."""
    clock, screen = Clock(), io.StringIO()
    with Bars(Console(file=screen, width=width, force_terminal=True, legacy_windows=False), clock) as bars:
        for clock.now in range(0, 101):
            bars.show("samples", 772 + int(5 * clock.now), 1664, words)
        bars.show("training", 0, 1100, "starting")
    lines = re.split(r"[\r\n]+", CONTROL.sub("", screen.getvalue()))
    return [line for line in lines if line.strip()][-2:]


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_stand_whole_in_one_line_and_only_words_are_cut(width: int) -> None:
    samples, training = drawn(width, WORDS)

    assert re.search(r"samples .*━.* 1,272/1,664 +5\.0/s .*1:18 left +1,257 ok.*…$", samples.rstrip())
    assert re.search(r"training .* 0/1,100 .*starting$", training.rstrip())
    assert len(samples) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_the_layout_stays_when_words_come_and_go(width: int) -> None:
    silent, talking = drawn(width, "")[0], drawn(width, WORDS)[0]

    assert silent.rstrip().endswith("left")
    assert silent.index("1:18 left") == talking.index("1:18 left")


def test_what_an_earlier_start_did_and_a_jump_at_the_begin_count_for_nothing() -> None:
    estimate = Estimate()

    for now, completed in [(0, 0), (30, 900), (31, 901), (40, 910)]:
        estimate.note(completed, now, waiting=False)

    assert estimate.rate == 1
    assert estimate.left_s(1000) == 90


def test_waiting_is_left_out() -> None:
    estimate = Estimate()

    for now, completed, waiting in [(0, 0, False), (1, 10, False), (6, 20, False), (306, 20, True), (311, 30, False)]:
        estimate.note(completed, now, waiting=waiting)

    assert estimate.rate == 2


def test_nothing_is_estimated_from_a_moment() -> None:
    estimate = Estimate()

    for now, completed in [(0, 900), (1, 901), (2, 950)]:
        estimate.note(completed, now, waiting=False)

    assert estimate.rate is None
    assert estimate.left_s(1000) is None
