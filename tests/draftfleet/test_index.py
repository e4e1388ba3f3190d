"""The shard index: what it says is what the shards say, whatever was lost, damaged, moved aside or done twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from draftfleet import index
from draftfleet.accounting import Accountant
from draftfleet.index import LINES_PER_FILE, Entry, Index, fill
from draftfleet.names import batch_id
from draftfleet.outcomes import Counts
from draftfleet.queue import connect, make_app
from draftfleet.reconcile import Reconciler
from draftfleet.records import Prompt, Sample
from draftfleet.repair import set_aside
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage

FIRST, SECOND = batch_id("train", 0), batch_id("train", 1)


@pytest.fixture
def done(run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]) -> Run:
    """Two batches of four rows, both done; their lines are not written yet."""
    for number, batch in enumerate((FIRST, SECOND)):
        run.write_prompts(batch, make_prompts(4, start=4 * number))
        run.commit(batch, [make_sample(prompt, batch) for prompt in run.read_prompts(batch)])
    run.seal({"prompts": 8})
    return run


def reopened(run: Run) -> Run:
    return Run.open(run.storage, run.name)


def files(run: Run) -> list[Path]:
    return sorted(run.storage.local("run/index").glob("*.jsonl"))


def samples_are_not_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read = run.storage.read

    def read_no_shard(path: str) -> bytes:
        assert "/samples/" not in path
        assert "/prompts/" not in path
        return read(path)

    monkeypatch.setattr(run.storage, "read", read_no_shard)


def test_lines_say_rows_bytes_checksum_and_counts_of_both_kinds(done: Run) -> None:
    done.index.flush()

    known = reopened(done).index
    samples, prompts = known.read("samples"), known.read("prompts")

    for batch in (FIRST, SECOND):
        assert samples[batch].same_shard(done.entry("samples", batch))
        assert prompts[batch].same_shard(done.entry("prompts", batch))
    assert samples[FIRST].counts == Counts(ok=4, tokens=12)


def test_a_run_is_counted_without_reading_its_shards(done: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done.index.flush()
    samples_are_not_read(done, monkeypatch)

    accounting = Accountant(reopened(done)).account()

    assert (accounting.ok, accounting.pending, accounting.holds) == (8, 0, True)


def test_a_batch_that_waits_is_counted_by_the_line_of_its_prompts(
    done: Run, monkeypatch: pytest.MonkeyPatch, make_prompts: Callable[..., list[Prompt]]
) -> None:
    done.write_prompts(batch_id("train", 2), make_prompts(5, start=8))
    done.index.flush()
    samples_are_not_read(done, monkeypatch)

    assert Accountant(reopened(done)).account().pending == 5


def test_a_line_that_was_never_written_costs_a_read_and_no_row(done: Run) -> None:
    accounting = Accountant(reopened(done)).account()

    assert (accounting.ok, accounting.holds) == (8, True)


def test_what_a_killed_worker_did_not_write_is_filled_in_by_the_reconciler(
    done: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: redis.Redis = connect(settings)

    Reconciler(make_app(settings), client, done.storage, settings.claims).republish()

    samples_are_not_read(done, monkeypatch)
    accounting = Accountant(reopened(done)).account()
    assert (accounting.ok, accounting.holds) == (8, True)


def test_one_look_spends_no_more_than_its_time_on_missing_lines_and_the_next_goes_on(done: Run) -> None:
    sizes = done.done_bytes()
    again = reopened(done)

    assert fill(again, sizes, limit_s=-1) is False
    assert again.index.read() == {}
    assert fill(again, sizes) is True
    assert set(again.index.read()) == {FIRST, SECOND}


def test_a_damaged_line_is_a_missing_one(done: Run) -> None:
    done.index.flush()
    [path] = files(done)
    text = path.read_text()
    where = text.index('"ok":4')
    path.write_text(text[:where] + '"ok":9' + text[where + 6 :])

    again = reopened(done)

    assert set(again.index.read("samples")) == {SECOND}
    assert Accountant(again).account().ok == 8


def test_a_torn_file_loses_its_last_line_alone(done: Run) -> None:
    done.index.flush()
    [path] = files(done)
    path.write_bytes(path.read_bytes()[:-20])

    assert set(reopened(done).index.read("samples")) == {FIRST}


def test_a_file_grows_to_its_limit_and_another_follows(run: Run) -> None:
    writer = Index(run)
    for number in range(LINES_PER_FILE + 3):
        writer.add(Entry.of("samples", batch_id("train", number), b"", 1))
        if number % 600 == 0:
            writer.flush()
    writer.flush()

    assert [len(path.read_text().splitlines()) for path in files(run)] == [LINES_PER_FILE, 3]
    assert len(reopened(run).index.read()) == LINES_PER_FILE + 3


def test_a_file_that_was_read_and_did_not_grow_is_not_read_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, storage: FileStorage
) -> None:
    writers, reader = [Index(run), Index(run)], Index(run)
    for number, writer in enumerate(writers):
        writer.add(Entry.of("samples", batch_id("train", number), b"", 1))
        writer.flush()
    reader.read()
    read: list[str] = []
    original = storage.read
    monkeypatch.setattr(storage, "read", lambda path: (read.append(path), original(path))[1])

    writers[1].add(Entry.of("samples", batch_id("train", 2), b"", 1))
    writers[1].flush()

    assert len(reader.read()) == 3
    assert len([path for path in read if "/index/" in path]) == 1


def test_a_flush_that_fails_forgets_nothing(done: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(done.storage, "put", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            done.index.flush()

    done.index.flush()

    assert set(reopened(done).index.read()) == {FIRST, SECOND}


def test_a_shard_that_was_moved_aside_and_done_anew_is_counted_as_it_is_now(
    done: Run, make_sample: Callable[..., Sample]
) -> None:
    done.index.flush()
    mender = reopened(done)
    assert set_aside(mender, [FIRST]) == [FIRST]
    assert Accountant(reopened(done)).account().pending == 4

    anew = [make_sample(prompt, FIRST, outcome="truncated") for prompt in done.read_prompts(FIRST)]
    assert reopened(done).commit(FIRST, anew)  # by a worker that was killed before it wrote the line

    accounting = Accountant(reopened(done)).account()
    assert (accounting.ok, accounting.truncated, accounting.holds) == (4, 4, True)


def test_a_clock_that_is_behind_takes_no_part_in_which_line_counts(
    done: Run, monkeypatch: pytest.MonkeyPatch, make_sample: Callable[..., Sample]
) -> None:
    done.index.flush()
    monkeypatch.setattr(index.time, "time", lambda: 5.0)
    set_aside(reopened(done), [FIRST])
    late = reopened(done)
    late.commit(FIRST, [make_sample(prompt, FIRST, outcome="truncated") for prompt in done.read_prompts(FIRST)])
    late.index.flush()

    once = reopened(done)
    assert Accountant(once).account().truncated == 4
    fill(once, once.done_bytes())

    again = reopened(done)
    assert again.index.read()[FIRST].same_shard(again.entry("samples", FIRST))


def test_a_shard_of_another_size_than_its_line_says_is_looked_at(done: Run) -> None:
    done.index.flush()
    path = done.storage.local(f"run/samples/{FIRST}.parquet")
    path.write_bytes(path.read_bytes()[:100])

    accounting = Accountant(reopened(done)).account()

    assert (accounting.corrupt, accounting.pending, accounting.holds) == ([FIRST], 4, True)


def test_a_line_comes_back_as_it_was_and_one_of_a_later_version_is_left_out() -> None:
    entry = Entry.of("samples", FIRST, b"data", 4, Counts(ok=4))

    assert Entry.from_line(entry.to_line()) == entry
    assert Entry.from_line(replace(entry, counts=None).to_line()) == replace(entry, counts=None)
    for line in ("", "{}", entry.to_line()[:-9], entry.to_line().replace("samples", "drafter")):
        assert Entry.from_line(line) is None


def test_the_worker_writes_the_lines_of_what_it_committed(done: Run) -> None:
    from workers.batch import Batch, Content
    from workers.guard import Guard
    from workers.holdings import Holdings
    from workers.partials import Partials

    fields: dict[str, Any] = {"content": Content.of(done), "claims": None, "token": "t", "attempt": 1, "task_id": ""}
    holdings = Holdings(Guard(lambda: None), on_lost=lambda _: None)
    batch = Batch(FIRST, done, **fields)
    holdings.hold(batch, Partials(done, "p"))
    holdings.free(batch.key)

    holdings.checkpoint()

    assert set(reopened(done).index.read()) == {FIRST, SECOND}


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_nothing_is_put_of_a_run_that_was_deleted(done: Run, *, is_made_anew: bool) -> None:
    done.index.flush()
    done.index.add(Entry.of("samples", SECOND, b"late", 4))
    done.storage.delete_folder("run")
    if is_made_anew:
        Run.create(done.storage, "run", {"target.model": "tiny"}, {})

    done.index.flush()

    assert not done.storage.local("run/index").exists()
