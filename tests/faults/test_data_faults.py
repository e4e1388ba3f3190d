"""Data that comes in or goes out, and breaks off or finds no room: what was there stays, and the next try mends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from draftfleet.accounting import Accountant
from draftfleet.errors import DataError
from draftfleet.export_data.export import export
from draftfleet.export_data.units import Wanted
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.storage import FileStorage
from draftfleet.testing.workers import changed, enqueue
from draftfleet.verify import verify
from producer.produce import produce

MakePrompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]

TARGET = Path(__file__).parents[2] / "examples/tiny-target"
BATCH_SIZE = 8
QUESTIONS = [f"Question {number}? {'Why? ' * (number * 7919 % 100)}" for number in range(2000)]

IN_NO_ROOM = """
import resource, sys
from draftfleet.cli import main
most = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
main()
"""
"""The command line where no file may be larger than so many bytes: writes fail in mid-file, as on a full disk."""


def lines(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts).encode()


def csv(texts: Sequence[str]) -> bytes:
    return ("id,prompt\n" + "".join(f'{number},"{text}"\n' for number, text in enumerate(texts))).encode()


def zst(texts: Sequence[str]) -> bytes:
    return pa.compress(lines(texts), codec="zstd", asbytes=True)


def array(texts: Sequence[str]) -> bytes:
    return json.dumps([{"prompt": text} for text in texts]).encode()


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("data.jsonl.zst", zst, "cannot be read after line"),
        ("data.json", array, "the JSON array is broken at object"),
        ("data.csv", csv, "is no CSV"),
    ],
)
def test_whatever_is_in_a_file_that_breaks_off_is_queued_in_full_batches_and_the_whole_file_completes_the_run(
    name: str,
    write: Callable[[Sequence[str]], bytes],
    said: str,
    settings: Settings,
    storage: FileStorage,
    tmp_path: Path,
) -> None:
    data, whole = tmp_path / name, write(QUESTIONS)
    settings = changed(settings, producer__data=str(data), producer__batch_size=BATCH_SIZE, producer__heldout=0.0)
    data.write_bytes(whole[: len(whole) * 4 // 5 if name.endswith("zst") else whole.index(b"Question 1500") + 9])

    with pytest.raises(DataError, match=said):
        produce(settings, progress=False)
    run = Run.open(storage, "run")
    before, sealed = run.batches(), run.sealed()
    data.write_bytes(whole)
    report = produce(settings, progress=False)

    prompts = Counter(str(one.messages[0]["content"]) for name in run.batches() for one in run.read_prompts(name))
    assert (sealed, report.lines, report.already) == (None, 2000, BATCH_SIZE * len(before))
    assert before
    assert prompts == Counter(QUESTIONS)
    account = Accountant(run).account()
    assert (account.expected, account.pending, account.holds) == (2000, 2000, True)


@pytest.fixture
def filled(settings: Settings, run: Run, make_prompts: MakePrompts, make_sample: MakeSample) -> Run:
    """Of four batches two are done."""
    names = enqueue(settings, run, make_prompts(32))
    for name in names[:2]:
        samples = [make_sample(prompt, name, content="Answer. " * 50) for prompt in run.read_prompts(name)]
        run.commit(name, samples)
    return run


def call(settings: Settings, *arguments: str, most_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    python = ["-m", "draftfleet"] if most_bytes is None else ["-c", IN_NO_ROOM, str(most_bytes)]
    return subprocess.run(
        [sys.executable, *python, *arguments],
        env=os.environ | environment(settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("format", ["jsonl.zst", "parquet", "specforge"])
def test_an_export_that_finds_no_room_says_so_and_leaves_the_earlier_one_alone(
    format: str, settings: Settings, filled: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "out" / "data"
    export(settings, folder, Wanted(format="jsonl", limit=1))
    before = files(folder)

    failed = call(settings, "export-data", str(folder), "--format", format, "--overwrite", most_bytes=512)

    assert failed.returncode == 6
    assert f"could not write {folder}: File too large. Make room" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert files(folder) == before
    assert list(folder.parent.iterdir()) == [folder]


def test_an_import_that_finds_no_room_is_completed_by_the_next_and_nothing_is_doubled(
    settings: Settings, filled: Run, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    paid = tmp_path / "paid.jsonl"
    # Of the third batch one row, in a file that is small enough; the fourth is whole, and too large.
    wanted = [make_prompts(32)[16], *make_prompts(32)[24:]]
    rows: list[dict[str, Any]] = [
        {"prompt": one.messages[0]["content"], "completion": f"Paid {number}. " * (1 if number == 0 else 90)}
        for number, one in enumerate(wanted)
    ]
    paid.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = changed(settings, target__path=str(TARGET))
    arguments = ("import-data", str(paid), "--trust-text")

    failed = call(settings, *arguments, most_bytes=4096)
    midway = Accountant(filled).account()
    done, again = (json.loads(call(settings, *arguments).stdout) for _ in range(2))

    assert failed.returncode == 6
    assert "File too large. Make room" in failed.stderr
    assert "any other command is to be run again" in failed.stderr
    assert (midway.holds, midway.ok, midway.pending) == (True, 16, 16)
    assert (done["imported"] + done["already"], again["imported"], again["missing"]) == (9, 0, 7)
    account = Accountant(filled).account()
    assert (account.ok, account.pending, account.holds) == (24, 8, True)
    assert verify(filled).faults == []
