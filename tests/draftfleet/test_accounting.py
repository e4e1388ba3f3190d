"""expected = ok + truncated + failed + pending, whatever happened to the batches on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftfleet.accounting import Accountant
from draftfleet.names import batch_id, parts_of
from draftfleet.records import Prompt, Sample
from draftfleet.repair import move_aside
from draftfleet.runs import Run
from draftfleet.storage import FileStorage

Prompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]


@pytest.fixture
def half_done(run: Run, make_prompts: Prompts, make_sample: MakeSample) -> Run:
    """12 prompts in 3 batches: one done with all outcomes, one split with a row of each fate, one waiting."""
    done, split, waiting = (batch_id("train", number) for number in range(3))
    for number, batch in enumerate((done, split, waiting)):
        run.write_prompts(batch, make_prompts(4, start=4 * number))
    outcomes: list[Any] = ["ok", "ok", "truncated", "failed"]
    prompts = run.read_prompts(done)
    run.commit(done, [make_sample(prompt, outcome=outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)])
    run.split(split, 4)
    ok, dead, *_ = parts_of(split, 4)
    run.commit(ok, [make_sample(prompt, ok) for prompt in run.read_prompts(ok)])
    run.bury(dead, make_sample(run.read_prompts(dead)[0], dead, outcome="failed", completion_tokens=-1))
    run.seal({"prompts": 12})
    return run


def test_every_row_is_counted_once(half_done: Run) -> None:
    accounting = Accountant(half_done).account()

    assert (accounting.ok, accounting.truncated, accounting.failed, accounting.pending) == (3, 1, 2, 6)
    assert accounting.expected == 12
    assert accounting.holds
    assert not accounting.is_complete


def test_a_late_shard_of_a_split_batch_beats_the_grave_and_doubles_nothing(
    half_done: Run, make_sample: MakeSample
) -> None:
    split = batch_id("train", 1)

    half_done.commit(split, [make_sample(prompt, split) for prompt in half_done.read_prompts(split)])

    accounting = Accountant(half_done).account()
    assert (accounting.ok, accounting.truncated, accounting.failed, accounting.pending) == (6, 1, 1, 4)
    assert accounting.holds


def test_shards_of_single_rows_are_read_once_however_often_is_counted(
    half_done: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    accountant = Accountant(half_done)
    first = accountant.account()
    reads: list[str] = []
    read = half_done.storage.read
    monkeypatch.setattr(half_done.storage, "read", lambda path: (reads.append(path), read(path))[1])

    again = accountant.account()

    assert again == first
    assert [path for path in reads if "/samples/" in path] == []


def test_a_shard_after_the_grave_beats_it(half_done: Run, make_sample: MakeSample) -> None:
    dead = parts_of(batch_id("train", 1), 4)[1]

    half_done.commit(dead, [make_sample(prompt, dead) for prompt in half_done.read_prompts(dead)])

    accounting = Accountant(half_done).account()
    assert (accounting.ok, accounting.failed, accounting.pending, accounting.dead) == (4, 1, 6, 0)


def test_a_lost_row_breaks_the_identity(half_done: Run, make_sample: MakeSample) -> None:
    waiting = batch_id("train", 2)

    half_done.commit(waiting, [make_sample(prompt, waiting) for prompt in half_done.read_prompts(waiting)[:3]])

    assert not Accountant(half_done).account().holds


def test_a_corrupt_shard_is_named_counts_as_pending_and_is_repaired(half_done: Run) -> None:
    done = batch_id("train", 0)
    path = half_done.storage.local(f"run/samples/{done}.parquet")
    path.write_bytes(path.read_bytes()[:100])

    before = Accountant(half_done).account()
    assert before.corrupt == [done]
    assert (before.pending, before.holds) == (10, True)

    assert move_aside(half_done) == [done]
    after = Accountant(half_done).account()
    assert (after.pending, after.corrupt, after.holds) == (10, [], True)


def test_a_batch_that_is_done_while_the_run_is_being_read_is_counted_once(
    half_done: Run, make_sample: MakeSample
) -> None:
    waiting = batch_id("train", 2)

    class Busy(FileStorage):
        """A worker commits as soon as somebody has listed what is done."""

        def sizes(self, folder: str) -> dict[str, int]:
            found = super().sizes(folder)
            if folder == "run/samples":
                half_done.commit(waiting, [make_sample(prompt, waiting) for prompt in half_done.read_prompts(waiting)])
            return found

    assert isinstance(half_done.storage, FileStorage)

    accounting = Accountant(Run.open(Busy(half_done.storage.root), "run")).account()

    assert half_done.is_done(waiting)
    assert (accounting.pending, accounting.holds) == (6, True)


def test_a_run_that_is_not_sealed_has_no_expectation(half_done: Run) -> None:
    half_done.unseal()

    accounting = Accountant(half_done).account()

    assert accounting.expected is None
    assert not accounting.is_complete
