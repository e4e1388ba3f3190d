"""Rows that are asked again: each counts once at every moment, whatever came in between."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from draftfleet.accounting import Accountant, Accounting
from draftfleet.asking_again import Asking, create, mend
from draftfleet.letters import find
from draftfleet.names import again_id, batch_id, is_again, parent_of, parts_of, split_of
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.wire import BatchMessage

MakePrompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]

WHOLE, SPLIT = batch_id("train", 0), batch_id("train", 1)
FIRST, SECOND = again_id("train", 0), again_id("train", 1)
FAILED: dict[str, Any] = {
    "outcome": "failed",
    "error_kind": "transient",
    "error": "it broke off",
    "token_ids": [],
    "prompt_token_ids": [],
    "ids_source": "none",
    "completion_tokens": -1,
}


@pytest.fixture
def bad(run: Run, make_prompts: MakePrompts, make_sample: MakeSample) -> Run:
    """8 prompts: a shard with 2 ok, 1 truncated, 1 failed; a split batch with 1 ok, 1 failed, 1 parked, 1 pending."""
    for number, batch in enumerate((WHOLE, SPLIT)):
        run.write_prompts(batch, make_prompts(4, start=4 * number))
    rows = run.read_prompts(WHOLE)
    said: list[dict[str, Any]] = [{}, {}, {"outcome": "truncated"}, FAILED]
    run.commit(WHOLE, [make_sample(row, WHOLE, **fields) for row, fields in zip(rows, said, strict=True)])
    run.split(SPLIT, 4)
    ok, failed, parked, _ = parts_of(SPLIT, 4)
    run.commit(ok, [make_sample(row, ok) for row in run.read_prompts(ok)])
    run.commit(failed, [make_sample(row, failed, **FAILED) for row in run.read_prompts(failed)])
    run.bury(parked, make_sample(run.read_prompts(parked)[0], parked, **FAILED))
    run.seal({"prompts": 8})
    return run


def account(run: Run) -> tuple[int, int, int, int]:
    """Of a fresh reader; the identity must hold."""
    said = Accountant(run).account()
    assert said.holds, said
    return said.ok, said.truncated, said.failed, said.pending


def revive(run: Run, batch_size: int = 64, *, alone: bool = False) -> dict[str, int]:
    rows = [Asking(letter.sample, alone=alone) for letter in find(run) if letter.sample is not None]
    return create(run, rows, batch_size=batch_size)


def answer(run: Run, batch: str, make_sample: MakeSample, **fields: Any) -> None:
    run.commit(batch, [make_sample(prompt, batch, **fields) for prompt in run.read_prompts(batch)])


def test_a_batch_that_asks_again_is_a_batch_of_its_split_in_every_name() -> None:
    part = parts_of(again_id("heldout", 3), 2)[1]

    assert split_of(part) == "heldout"
    assert parent_of(part) == ("heldout-again-000003", 1)
    assert is_again(part)
    assert not is_again("heldout-000003.0001")
    for name in (again_id("heldout", 3), part):
        assert BatchMessage.parse({"v": 1, "run_id": "0" * 32, "run": "r", "batch": name}).batch == name


def test_rows_that_are_asked_again_are_pending_and_then_the_better_record_counts(
    bad: Run, make_sample: MakeSample
) -> None:
    assert account(bad) == (3, 1, 3, 1)

    made = revive(bad)
    while_asked = account(bad)
    answer(bad, FIRST, make_sample)

    assert made == {FIRST: 3}
    assert FIRST not in bad.outstanding()
    assert while_asked == (3, 1, 0, 4)
    assert account(bad) == (6, 1, 0, 1)
    assert Accountant(bad).account().tokens == 3 * 7
    assert Accountant(bad).account().dead == 0
    assert not list(find(bad))


def test_a_row_is_asked_again_once_however_often_it_is_revived(bad: Run) -> None:
    first = revive(bad)

    assert first == {FIRST: 3}
    assert not list(find(bad))
    assert revive(bad) == {}


def test_a_row_that_fails_again_can_be_revived_again(bad: Run, make_sample: MakeSample) -> None:
    revive(bad)
    answer(bad, FIRST, make_sample, **FAILED)
    failed_again = account(bad)

    made = revive(bad)
    pending = account(bad)
    answer(bad, SECOND, make_sample)

    assert failed_again == (3, 1, 3, 1)
    assert made == {SECOND: 3}
    assert pending == (3, 1, 0, 4)
    assert account(bad) == (6, 1, 0, 1)


def test_a_shard_that_comes_late_is_counted_with_its_successor_as_one_row(bad: Run, make_sample: MakeSample) -> None:
    revive(bad)
    answer(bad, SPLIT, make_sample)
    late = account(bad)
    answer(bad, FIRST, make_sample, **FAILED)

    assert late == (4, 1, 0, 3)  # asked again, so pending; the row that nobody asks again is answered
    assert account(bad) == (6, 1, 1, 0)  # two of the three have a late answer that beats the failure
    assert [letter.batch for letter in find(bad)] == [FIRST]


def test_a_damaged_shard_that_was_done_again_counts_as_it_is_now(bad: Run, make_sample: MakeSample) -> None:
    revive(bad)
    answer(bad, FIRST, make_sample, **FAILED)
    bad.set_aside(WHOLE)
    redone = account(bad)
    answer(bad, WHOLE, make_sample)

    assert redone == (1, 0, 2, 5)
    assert account(bad) == (5, 0, 2, 1)


def test_an_again_batch_may_be_split_and_a_row_of_it_may_die(bad: Run, make_sample: MakeSample) -> None:
    revive(bad)
    bad.split(FIRST, 3)
    one, other, last = parts_of(FIRST, 3)
    answer(bad, one, make_sample)
    bad.bury(other, make_sample(bad.read_prompts(other)[0], other, **FAILED))
    between = account(bad)
    answer(bad, last, make_sample)

    assert between == (4, 1, 1, 2)
    assert account(bad) == (5, 1, 1, 1)
    [letter] = find(bad)
    assert letter.batch == other
    assert revive(bad) == {SECOND: 1}
    assert account(bad) == (5, 1, 0, 2)


def test_rows_that_end_their_holder_are_single_from_the_start(bad: Run) -> None:
    made = revive(bad, alone=True)

    assert made == {FIRST: 3}
    assert [batch for batch in bad.outstanding() if is_again(batch)] == parts_of(FIRST, 3)
    assert account(bad) == (3, 1, 0, 4)


def test_an_outcome_that_is_no_failure_can_be_superseded_too(bad: Run, make_sample: MakeSample) -> None:
    truncated = [sample for sample in bad.read_samples(WHOLE) if sample.outcome == "truncated"]

    made = create(bad, map(Asking, truncated), batch_size=64)
    asked = account(bad)
    answer(bad, FIRST, make_sample, **FAILED)

    assert made == {FIRST: 1}
    assert asked == (3, 0, 3, 2)
    assert account(bad) == (3, 1, 3, 1)
    assert FIRST not in {letter.batch for letter in find(bad)}


def test_many_who_revive_at_the_same_moment_ask_each_row_once(bad: Run) -> None:
    gate = threading.Barrier(6)
    made: list[dict[str, int]] = []

    def one() -> None:
        gate.wait()
        made.append(revive(bad, batch_size=1))

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    names = [name for one in made for name in one]
    keys = Counter(prompt.row_key for name in names for prompt in bad.read_prompts(name))
    assert sorted(names) == [again_id("train", number) for number in range(3)]
    assert set(keys.values()) == {1}
    assert len(keys) == 3
    assert account(bad) == (3, 1, 0, 4)


def test_what_a_process_left_that_died_in_reviving_is_finished_by_the_next(bad: Run) -> None:
    revive(bad, alone=True)
    wanted = bad.read_prompts(FIRST)
    bad.storage.delete(f"run/prompts/{FIRST}.jsonl.gz")
    bad.storage.delete(f"run/split/{FIRST}.json")
    half_made = account(bad)

    mended = mend(bad)

    assert half_made == (3, 1, 3, 1)
    assert mended == [FIRST]
    assert bad.read_prompts(FIRST) == wanted
    assert bad.is_split(FIRST)
    assert account(bad) == (3, 1, 0, 4)
    assert mend(bad) == []


def test_an_accountant_that_goes_on_says_what_a_fresh_one_says(bad: Run, make_sample: MakeSample) -> None:
    accountant = Accountant(bad)
    said: list[Accounting] = []
    for step in (lambda: revive(bad), lambda: answer(bad, FIRST, make_sample), lambda: answer(bad, SPLIT, make_sample)):
        step()
        said.append(accountant.account())
        assert said[-1] == Accountant(bad).account()

    assert [one.pending for one in said] == [4, 1, 0]
