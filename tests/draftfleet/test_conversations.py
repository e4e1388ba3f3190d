"""Conversations in the storage: counted, given up, asked again, always with the turns that are finished."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftfleet import again, shards
from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.conversations import Sources
from draftfleet.dead import export
from draftfleet.errors import CorruptFile
from draftfleet.letters import Filter, find
from draftfleet.names import again_id, batch_id, parts_of
from draftfleet.outcomes import Counts, best
from draftfleet.queue import connect, make_app
from draftfleet.reconcile import Reconciler
from draftfleet.records import Prompt, Sample, Turn
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage

MakeSample = Callable[..., Sample]

BATCH, FIRST, SECOND = batch_id("train", 0), again_id("train", 0), again_id("train", 1)
SOURCE = [
    {"role": role, "content": text}
    for role, text in (("user", "u1"), ("assistant", "A1"), ("user", "u2"), ("assistant", "A2"), ("user", "u3"))
]
PREFIX = [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "T1"}, {"role": "user", "content": "u2"}]
TURN = Turn(message=1, prompt_token_ids=[1], token_ids=[2, 3], ids_source="engine", completion_tokens=2)
NO_ANSWER: dict[str, Any] = {
    "outcome": "failed", "error": "refused", "error_kind": "bad_request", "token_ids": [], "ids_source": "none",
    "completion_tokens": -1, "ended": "the target gave no answer at turn 2 of 3",
}  # fmt: skip


@pytest.fixture
def run(storage: FileStorage) -> Run:
    content = {"target.model": "tiny", "sampling.max_tokens": 64, "producer.turns": "all"}
    return Run.create(storage, "run", content, {})


def a_prompt(name: str) -> Prompt:
    return Prompt(name, "train", SOURCE)


def at_the_second_turn(sample: Sample, **fields: Any) -> Sample:
    return replace(sample, messages=PREFIX, turns=[TURN], **fields)


@pytest.fixture
def failed(run: Run, make_sample: MakeSample) -> Run:
    """Two conversations: one whole, one that failed at its second turn."""
    prompts = [a_prompt("a"), a_prompt("b")]
    run.write_prompts(BATCH, prompts)
    whole = replace(make_sample(prompts[0]), messages=SOURCE, turns=[TURN, replace(TURN, message=3)])
    run.commit(BATCH, [whole, at_the_second_turn(make_sample(prompts[1]), **NO_ANSWER)])
    run.seal({"prompts": 2})
    return run


def revive(run: Run) -> dict[str, int]:
    return again.create(run, [letter.sample for letter in find(run) if letter.sample], batch_size=64)


def assert_is_what_is_left(prompt: Prompt) -> None:
    assert [message["content"] for message in prompt.messages] == ["u1", "T1", "u2", "A2", "u3"]
    assert prompt.turns == [TURN]
    assert prompt.row_key == a_prompt("b").row_key


def test_a_conversation_counts_once_and_its_turns_apart(failed: Run) -> None:
    account = Accountant(failed).account()

    assert (account.ok, account.failed, account.holds) == (1, 1, True)
    assert account.turns == 3 + 1
    assert account.tokens == (3 + 2 + 2) + 2
    assert account.ended == {"tool_calls": 0, "truncated": 0, "failed": 1}


def test_every_way_of_counting_gives_the_same(failed: Run) -> None:
    samples = failed.read_samples(BATCH)

    by_row = shards.outcomes_in(failed.read_shard("samples", BATCH))

    assert Counts.total(list(by_row.values())) == Counts.of(samples) == failed.counts(BATCH)


def test_a_shard_of_before_there_were_turns_can_be_counted(failed: Run) -> None:
    table = shards.table_in(failed.read_shard("samples", BATCH)).drop_columns(["turns", "ended", "sample", "drawn"])
    sink = io.BytesIO()
    pq.write_table(table, sink)

    by_row = shards.outcomes_in(sink.getvalue())

    assert by_row == {"a-0-2": Counts(ok=1, tokens=3), "b-0-2": Counts(failed=1)}
    assert [sample.turns for sample in shards.samples_in(sink.getvalue())] == [[], []]


def test_one_turn_whose_ids_differ_from_usage_makes_its_conversation_a_mismatched_row(make_sample: MakeSample) -> None:
    sample = at_the_second_turn(make_sample(a_prompt("a")))

    assert Counts.of([sample]).mismatched == 0
    assert Counts.of([replace(sample, turns=[replace(TURN, completion_tokens=9)])]).mismatched == 1


def test_reviving_asks_what_is_left_on_the_turns_that_are_finished(failed: Run, make_sample: MakeSample) -> None:
    assert revive(failed) == {FIRST: 1}
    [prompt] = failed.read_prompts(FIRST)
    assert_is_what_is_left(prompt)
    while_asked = Accountant(failed).account()

    failed.commit(FIRST, [at_the_second_turn(make_sample(prompt, FIRST), row_key=prompt.row_key, **NO_ANSWER)])
    assert revive(failed) == {SECOND: 1}

    [prompt] = failed.read_prompts(SECOND)
    assert_is_what_is_left(prompt)
    assert (while_asked.pending, while_asked.failed, while_asked.turns) == (1, 0, 3)
    assert Accountant(failed).account().turns == 3


def test_an_again_batch_that_was_left_half_made_is_finished_with_the_turns(failed: Run) -> None:
    revive(failed)
    failed.storage.delete(f"run/prompts/{FIRST}.jsonl.gz")

    assert again.mend(failed) == [FIRST]

    assert_is_what_is_left(failed.read_prompts(FIRST)[0])


def test_a_conversation_without_its_source_is_an_error_that_says_what_to_do(failed: Run) -> None:
    sample = failed.read_samples(BATCH)[1]
    failed.storage.delete(f"run/prompts/{BATCH}.jsonl.gz")

    with pytest.raises(CorruptFile, match=r"b-0-2 is not in the prompts of batch train-000000.*Restore"):
        Sources(failed).prompt(sample)


def test_dead_letters_are_exported_with_what_is_left_of_the_source(
    failed: Run, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    export(settings, Filter(), "-")

    assert '"A2"' in capsys.readouterr().out


def test_a_conversation_that_is_given_up_keeps_the_turns_that_stand_in_partials(
    run: Run, settings: Settings, make_sample: MakeSample, until: Callable[..., Any]
) -> None:
    client, knobs = connect(settings), load(flags={"claims.ttl_s": 0.02, "claims.max_attempts": 1}).claims
    reconciler = Reconciler(make_app(settings), client, run.storage, knobs)
    reconciler.discover()
    prompt = a_prompt("b")
    run.write_prompts(BATCH, [prompt])
    run.split(BATCH, 1)
    [part] = parts_of(BATCH, 1)
    run.write_partial("p", 0, [at_the_second_turn(make_sample(prompt), outcome="unfinished")])

    Claims(client, run.run_id, knobs, "victim").take(part)
    until(reconciler.sweep)

    grave = run.dead()[part]
    assert (grave.outcome, grave.turns, grave.messages) == ("failed", [TURN], PREFIX)


def test_of_equal_records_the_one_with_more_turns_counts(make_sample: MakeSample) -> None:
    fewer = replace(make_sample(a_prompt("a")), outcome="unfinished", turns=[])
    more = replace(fewer, turns=[TURN])

    assert best([more, fewer])["a-0-2"] is more
    assert best([fewer, more])["a-0-2"] is more
