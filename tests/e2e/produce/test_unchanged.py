"""A data set that was read is recognised by its content: not read again, and read again as soon as anything differs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from draftfleet.accounting import Accountant
from draftfleet.errors import DataError
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from producer.produce import produce

Configure = Callable[..., Settings]
Questions = Callable[..., list[str]]
Write = Callable[[Path, list[str]], Path]
Contents = Callable[[Run], Counter[str]]
Texts = Callable[[list[str]], Counter[str]]
Queued = Callable[[redis.Redis], list[str]]


@pytest.fixture
def data(tmp_path: Path, questions: Questions, write: Write) -> Path:
    """30 prompts, two of them twice, and two lines that are none."""
    return write(tmp_path / "data.jsonl", [*questions(30), *questions(2), "{\n", '{"prompt": ""}\n'])


def test_a_second_pass_over_the_same_file_reads_nothing_and_tells_the_same(
    configure: Configure, storage: FileStorage, data: Path
) -> None:
    first = produce(configure(data), progress=False)
    sealed = Run.open(storage, "run").sealed()

    again = produce(configure(data), progress=False)

    assert (first.already_read, first.new, first.duplicates, first.malformed) == (False, 30, 2, 1)
    assert again == replace(first, already_read=True, new=0, already=30, batches=0, seconds=again.seconds)
    assert Run.open(storage, "run").sealed() == sealed


def test_under_another_name_or_date_it_is_still_the_same(configure: Configure, data: Path) -> None:
    produce(configure(data), progress=False)

    moved = data.rename(data.with_name("moved.jsonl"))
    os.utime(moved, (1, 1))

    assert produce(configure(moved), progress=False).already_read


def test_a_file_that_changed_is_read_even_where_size_and_date_are_the_same(
    configure: Configure, storage: FileStorage, data: Path, contents: Contents
) -> None:
    produce(configure(data), progress=False)
    before = data.stat()
    data.write_text(data.read_text().replace("What is 7 times", "What is 7 minus"))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert data.stat().st_size == before.st_size

    report = produce(configure(data), progress=False)

    assert (report.already_read, report.new, report.already) == (False, 1, 29)
    assert contents(Run.open(storage, "run"))["What is 7 minus 7?"] == 1


def test_every_file_of_a_run_is_recognised_not_the_last_one_alone(
    configure: Configure, storage: FileStorage, data: Path, tmp_path: Path, questions: Questions, write: Write
) -> None:
    other = write(tmp_path / "other.jsonl", questions(50))
    for path in (data, other):
        produce(configure(path), progress=False)

    first, second = (produce(configure(path), progress=False) for path in (data, other))

    assert (first.already_read, first.prompts, first.run_prompts) == (True, 30, 50)
    assert (second.already_read, second.prompts, second.run_prompts) == (True, 50, 50)
    assert Accountant(Run.open(storage, "run")).account().expected == 50


def test_it_is_read_again_where_it_is_read_in_another_way(configure: Configure, data: Path, tmp_path: Path) -> None:
    produce(configure(data), progress=False)

    assert not produce(configure(data, producer__limit=3), progress=False).already_read
    with pytest.raises(DataError, match="line 33"):
        produce(configure(data, producer__strict=True), progress=False)

    table = pa.Table.from_pylist([json.loads(line) for line in data.read_text().splitlines()[:30]])
    pq.write_table(table, tmp_path / "data.parquet")
    columns = produce(configure(tmp_path / "data.parquet"), progress=False)
    assert (columns.already_read, columns.already) == (False, 30)


def test_it_is_read_again_where_a_prompt_shard_was_lost(
    configure: Configure, storage: FileStorage, data: Path, contents: Contents
) -> None:
    produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    whole = contents(run)
    storage.delete(f"run/prompts/{run.batches()[0]}.jsonl.gz")

    report = produce(configure(data), progress=False)

    assert (report.already_read, report.run_prompts) == (False, 30)
    assert contents(run) == whole


def test_it_is_read_again_where_the_run_is_not_sealed(configure: Configure, storage: FileStorage, data: Path) -> None:
    produce(configure(data), progress=False)
    Run.open(storage, "run").unseal()

    report = produce(configure(data), progress=False)

    assert (report.already_read, report.already) == (False, 30)
    assert Run.open(storage, "run").sealed() is not None


def test_batches_that_are_in_nobodys_hands_are_published_though_nothing_is_read(
    configure: Configure, client: redis.Redis, storage: FileStorage, data: Path, queued: Queued
) -> None:
    produce(configure(data), progress=False)
    client.flushall()

    assert produce(configure(data), progress=False).already_read

    assert sorted(queued(client)) == Run.open(storage, "run").batches()


def test_a_file_that_is_written_to_while_it_is_read_is_not_recognised(
    configure: Configure, storage: FileStorage, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Run.write_prompts_of

    def append(run: Run, batches: Any) -> int:
        with data.open("a") as file:
            file.write(json.dumps({"prompt": "Late?"}) + "\n")
        return publish(run, batches)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "write_prompts_of", append)
        produce(configure(data), progress=False)

    assert (Run.open(storage, "run").sealed() or {})["passes"] == {}
