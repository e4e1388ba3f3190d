"""One event a line, readable by a person and by `grep`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from draftfleet.damper import Damper
from draftfleet.logfile import RotatingFile
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.storage import open_storage


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


def in_a_process(code: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import logging, sys; from draftfleet import logs\n{code}", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)


def test_a_log_file_is_put_aside_at_its_size_and_the_oldest_is_removed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "logs.setup(file=Path(sys.argv[1]), max_mb=0.01, keep=2)\n"
        "for i in range(1000): logging.getLogger('workers.x').info(logs.event('batch done', number=i))\n"
    )

    result = in_a_process(code, str(tmp_path / "logs/work.log"))

    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["work.log", "work.log.1", "work.log.2"]
    assert all(path.stat().st_size <= 10_000 for path in (tmp_path / "logs").iterdir())
    texts = [(tmp_path / "logs" / name).read_text() for name in reversed(files)]
    numbers = [int(line.rpartition("=")[2]) for line in "".join(texts).splitlines()]
    assert numbers == list(range(numbers[0], 1000)), "no line is lost between two files"
    assert len(result.stderr.splitlines()) == 1000, "standard error has all of them"


def test_what_is_printed_past_the_logger_follows_into_the_new_file(tmp_path: Path) -> None:
    """As in a child of `draftfleet up`, whose standard error is the file that it rotates."""
    log = tmp_path / "work.log"
    code = (
        "from pathlib import Path\n"
        "logs.setup(file=Path(sys.argv[1]), max_mb=0.01, keep=1)\n"
        "for i in range(250): logging.getLogger('workers.x').info(logs.event('batch done', number=i))\n"
        "print('printed', flush=True); raise SystemExit('a last word')\n"
    )

    with log.open("ab") as output:
        command = [sys.executable, "-c", f"import logging, sys; from draftfleet import logs\n{code}", str(log)]
        subprocess.run(command, stdout=output, stderr=output, timeout=60, check=False)

    assert (tmp_path / "work.log.1").exists()
    last = log.read_text().splitlines()
    assert last[-2:] == ["printed", "a last word"]
    assert sum("number=249" in line for line in last) == 1, "each line is there once, not twice"


def test_a_second_process_is_refused_a_log_file_that_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "work.log"
    code = "from pathlib import Path; logs.setup(file=Path(sys.argv[1]))"

    first = RotatingFile(path)
    try:
        refused = in_a_process(code, str(path), check=False)
        first.doRollover()
        refused_again = in_a_process(code, str(path), check=False)
    finally:
        first.close()
    allowed = in_a_process(code, str(path), check=False)

    for result in (refused, refused_again):
        assert "is written by another process: give each its own" in result.stderr
        assert "{verb}-{pid}.log" in result.stderr
    assert allowed.returncode == 0


def test_settings_that_are_read_again_go_on_with_the_same_file(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "log = logging.getLogger('workers.x')\n"
        "logs.setup('WARNING', file=Path(sys.argv[1])); log.info(logs.event('unheard'))\n"
        "logs.setup('INFO', file=Path(sys.argv[1])); log.info(logs.event('heard'))\n"
    )

    in_a_process(code, str(tmp_path / "work.log"))

    lines = (tmp_path / "work.log").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("workers.x: heard")


def test_json_lines_keep_the_fields_as_they_are() -> None:
    code = (
        "logs.setup(as_json=True); log = logging.getLogger('workers.x')\n"
        "log.info(logs.event('batch done', rows=64, seconds=84.25, why='two words'))\n"
        "logging.getLogger('celery').warning('lost %s', 'redis')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: log.exception(logs.event('row raised'))\n"
    )

    result = in_a_process(code)

    first, second, third = map(json.loads, result.stderr.splitlines())
    assert first.pop("time") > 1.7e9
    assert first == {
        "level": "INFO", "logger": "workers.x", "event": "batch done", "rows": 64, "seconds": 84.25, "why": "two words",
    }  # fmt: skip
    assert (second["logger"], second["event"]) == ("celery", "lost redis")
    assert "ZeroDivisionError" in third["traceback"]


def test_a_fault_that_lasts_a_week_does_not_fill_the_disk() -> None:
    clock = [0.0]
    damper = Damper(lambda: clock[0])
    log = logging.getLogger("workers.pool")
    said: list[logging.LogRecord] = []

    for number in range(7 * 24 * 360):
        clock[0] = 10.0 * number
        line = event("row to be tried again", row=f"row-{number}", server="http://x")
        record = log.makeRecord(log.name, logging.INFO, "", 0, line, (), None)
        if damper.filter(record):
            said.append(record)

    assert 30 <= len(said) <= 30 + 7 * 24 * 3600 / 30
    unsaid = sum(getattr(record, "unsaid", 0) for record in said)
    assert 0 <= 7 * 24 * 360 - len(said) - unsaid < 6, "and each line that was left out is counted"


def test_lines_about_batches_and_warnings_of_another_kind_are_not_damped() -> None:
    damper = Damper(lambda: 0.0)
    log = logging.getLogger("workers.tasks")

    def is_said(level: int, text: str, **fields: object) -> bool:
        return damper.filter(log.makeRecord(log.name, level, "", 0, event(text, **fields), (), None))

    assert all(is_said(logging.INFO, "batch done", batch=number) for number in range(1000))
    assert sum(is_said(logging.WARNING, "row failed", row=number) for number in range(1000)) == 30
    assert is_said(logging.WARNING, "claim lost", batch="train-000001")
    assert is_said(logging.ERROR, "row failed", row="as an error it is another kind")


def test_a_long_verb_logs_to_the_file_of_its_settings_and_a_short_one_does_not(
    tmp_path: Path, settings: Settings
) -> None:
    env = environment(settings) | {
        "DRAFTFLEET_LOGS__FILE": str(tmp_path / "logs/{verb}.log"),
        "DRAFTFLEET_LOGS__FORMAT": "json",
    }
    Run.create(open_storage(settings.storage.url), "run", {"target.model": "tiny"}, {})

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftfleet", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)

    short, long = call("status", "--json"), call("work", "--servers", "ftp://wrong")

    assert short.returncode == 0, short.stderr
    assert "worker.servers has 'ftp://wrong'" in long.stderr
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["work.log"]
