"""Cut answers that go on: which are asked, with what, and that each row counts once whatever comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftfleet import asking_again, cli
from draftfleet.accounting import Accountant, Accounting
from draftfleet.continuing import go_on
from draftfleet.errors import RunConflict, SettingsError
from draftfleet.letters import find
from draftfleet.names import again_id, batch_id, parts_of
from draftfleet.orders import cancel
from draftfleet.outcomes import best
from draftfleet.queue import connect, queued
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.status import warnings

MakePrompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]

WHOLE, SPLIT = batch_id("train", 0), batch_id("train", 1)
FIRST, SECOND = again_id("train", 0), again_id("train", 1)
CUT: dict[str, Any] = {"outcome": "truncated", "finish_reason": "length", "reasoning": "Well", "content": None}
FAILED: dict[str, Any] = {
    "outcome": "failed",
    "error_kind": "bad_request",
    "error": "prompt 12 on http://a:1: it takes no token ids",
    "token_ids": [],
    "completion_tokens": -1,
    "ids_source": "none",
}
LEFT_OUT = [
    ("ended otherwise", {"finish_reason": "content_filter"}),
    ("without exact ids", {"ids_source": "retokenized"}),
    ("without exact ids", {"completion_tokens": 4}),
    ("without exact ids", {"prompt_token_ids": []}),
    ("with tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("long enough", {"token_ids": list(range(8)), "completion_tokens": 8}),
]


@pytest.fixture
def cut(run: Run, make_prompts: MakePrompts, make_sample: MakeSample) -> Run:
    """8 prompts: a shard with 2 cut, 1 ok, 1 failed; a split batch with 1 cut, 1 ok, 1 parked, 1 pending."""
    for number, batch in enumerate((WHOLE, SPLIT)):
        run.write_prompts(batch, make_prompts(4, start=4 * number))
    said: list[dict[str, Any]] = [CUT, CUT, {}, FAILED]
    rows = zip(run.read_prompts(WHOLE), said, strict=True)
    run.commit(WHOLE, [make_sample(row, WHOLE, **fields) for row, fields in rows])
    run.split(SPLIT, 4)
    one, ok, parked, _ = parts_of(SPLIT, 4)
    run.commit(one, [make_sample(row, one, **CUT) for row in run.read_prompts(one)])
    run.commit(ok, [make_sample(row, ok) for row in run.read_prompts(ok)])
    run.bury(parked, make_sample(run.read_prompts(parked)[0], parked, **FAILED))
    run.seal({"prompts": 8})
    return run


def account(run: Run) -> tuple[int, int, int, int]:
    """Of a fresh reader; the identity must hold."""
    said = Accountant(run).account()
    assert said.holds, said
    return said.ok, said.truncated, said.failed, said.pending


def answer(run: Run, batch: str, make_sample: MakeSample, **fields: Any) -> None:
    """As a worker does that went on with each answer: two tokens more."""
    for prompt in run.read_prompts(batch):
        assert prompt.unfinished is not None
        ids = [*prompt.unfinished.token_ids, 11, 2]
        longer = {"token_ids": ids, "completion_tokens": len(ids), "content": "Well, yes.", **fields}
        samples = [make_sample(one, batch, **longer) for one in run.read_prompts(batch)]
    run.commit(batch, samples)


def test_cut_answers_are_pending_while_they_go_on_and_then_the_whole_answer_counts(
    cut: Run, settings: Settings, make_sample: MakeSample
) -> None:
    assert account(cut) == (2, 3, 2, 1)

    said = go_on(settings, max_tokens=8, dry_run=False)
    while_asked = account(cut)
    published = queued(connect(settings), "tiny")
    answer(cut, FIRST, make_sample)

    assert said == {"rows": 3, "batches": 1, "mended_batches": 0, "left_out": {}, "failed_before": {}}
    assert while_asked == (2, 0, 2, 4)
    assert published == 1
    assert account(cut) == (5, 0, 2, 1)
    assert Accountant(cut).account().tokens == 3 * 5 + 2 * 3
    assert go_on(settings, max_tokens=8, dry_run=False)["rows"] == 0


def test_what_is_asked_holds_the_ids_the_texts_and_the_budget_and_the_row_stays_the_same(
    cut: Run, settings: Settings
) -> None:
    samples = {sample.row_key: sample for sample in cut.read_samples(WHOLE)}
    prompts = {prompt.row_key: prompt for prompt in cut.read_prompts(WHOLE)}

    go_on(settings, max_tokens=8, dry_run=False)

    asked = {prompt.row_key: prompt for prompt in cut.read_prompts(FIRST) if prompt.row_key in samples}
    assert len(asked) == 2
    for key, prompt in asked.items():
        sample, unfinished = samples[key], prompt.unfinished
        assert replace(prompt, unfinished=None) == prompts[key]
        assert unfinished is not None
        assert (unfinished.prompt_token_ids, unfinished.token_ids) == (sample.prompt_token_ids, sample.token_ids)
        assert (unfinished.reasoning, unfinished.content, unfinished.max_tokens) == ("Well", None, 8)


@pytest.mark.parametrize(("reason", "fields"), LEFT_OUT)
def test_an_answer_that_cannot_go_on_is_left_out_and_counted(
    reason: str,
    fields: dict[str, Any],
    run: Run,
    settings: Settings,
    make_prompts: MakePrompts,
    make_sample: MakeSample,
) -> None:
    run.write_prompts(WHOLE, make_prompts(2))
    one, other = run.read_prompts(WHOLE)
    strange = replace(make_sample(one, WHOLE, **CUT), **fields)
    run.commit(WHOLE, [strange, make_sample(other, WHOLE, **CUT)])
    run.seal({"prompts": 2})

    said = go_on(settings, max_tokens=8, dry_run=False)

    assert (said["rows"], said["left_out"]) == (1, {reason: 1})
    assert [prompt.row_key for prompt in run.read_prompts(FIRST)] == [other.row_key]
    assert account(run) == (0, 1, 0, 1)


def test_a_dry_run_counts_and_changes_nothing(cut: Run, settings: Settings) -> None:
    before = cut.batches()

    said = go_on(settings, max_tokens=8, dry_run=True)

    assert said == {"dry_run": True, "rows": 3, "left_out": {}, "failed_before": {}}
    assert cut.batches() == before
    assert account(cut) == (2, 3, 2, 1)


def test_rows_that_are_being_asked_are_left_out_and_counted(cut: Run, settings: Settings) -> None:
    go_on(settings, max_tokens=8, dry_run=False)

    again = go_on(settings, max_tokens=16, dry_run=False)

    assert (again["rows"], again["left_out"]) == (0, {"being asked": 3})


def test_where_going_on_fails_the_cut_answer_stands_and_can_be_asked_again(
    cut: Run, settings: Settings, make_sample: MakeSample
) -> None:
    go_on(settings, max_tokens=8, dry_run=False)
    answer(cut, FIRST, make_sample, **FAILED)
    stands = Accountant(cut).account()
    letters = {letter.batch for letter in find(cut)}

    dry = go_on(settings, max_tokens=8, dry_run=True)
    go_on(settings, max_tokens=8, dry_run=False)
    unfinished = [prompt.unfinished for prompt in cut.read_prompts(SECOND)]
    answer(cut, SECOND, make_sample)

    assert (stands.ok, stands.truncated, stands.failed, stands.pending) == (2, 3, 2, 1)
    assert stands.not_continued == 3
    assert stands.tokens == 5 * 3
    assert FIRST not in letters
    assert (dry["rows"], dry["failed_before"]) == (3, {"http://a:1: it takes no token ids": 3})
    assert [one.token_ids for one in unfinished if one] == 3 * [[8, 9, 2]]
    assert account(cut) == (5, 0, 2, 1)
    assert Accountant(cut).account().not_continued == 0


def test_status_says_that_cut_answers_could_not_go_on(cut: Run, settings: Settings, make_sample: MakeSample) -> None:
    go_on(settings, max_tokens=8, dry_run=False)
    answer(cut, FIRST, make_sample, **FAILED)

    said = CliRunner().invoke(cli.app, ["status", "--json"], env=environment(settings))

    assert any("3 cut answers could not go on and stand" in warning for warning in warnings(json.loads(said.stdout)))


def test_a_row_that_went_on_and_was_parked_stands_too(cut: Run, settings: Settings, make_sample: MakeSample) -> None:
    go_on(settings, max_tokens=8, dry_run=False)
    cut.split(FIRST, 3)
    before = Accountant(cut).account().dead
    for part in parts_of(FIRST, 3):
        cut.bury(part, make_sample(cut.read_prompts(part)[0], part, **FAILED))

    assert account(cut) == (2, 3, 2, 1)
    assert Accountant(cut).account().dead == before
    assert len(list(find(cut))) == 2
    assert go_on(settings, max_tokens=8, dry_run=True)["rows"] == 3


def test_of_two_answers_that_were_cut_the_longer_counts(cut: Run, settings: Settings, make_sample: MakeSample) -> None:
    go_on(settings, max_tokens=5, dry_run=False)
    answer(cut, FIRST, make_sample, **CUT)
    longer = Accountant(cut).account()

    enough = go_on(settings, max_tokens=5, dry_run=True)
    go_on(settings, max_tokens=9, dry_run=False)
    from_there = [prompt.unfinished for prompt in cut.read_prompts(SECOND)]
    kept = best(sample for name in cut.done() for sample in cut.read_samples(name))

    assert (longer.truncated, longer.tokens) == (3, 3 * 5 + 2 * 3)
    assert enough["left_out"] == {"long enough": 3}
    assert [one.token_ids for one in from_there if one] == 3 * [[8, 9, 2, 11, 2]]
    assert sorted(len(sample.token_ids) for sample in kept.values() if sample.outcome == "truncated") == [5, 5, 5]


def test_a_shorter_answer_does_not_take_the_place_of_a_longer(
    cut: Run, settings: Settings, make_sample: MakeSample
) -> None:
    go_on(settings, max_tokens=5, dry_run=False)
    answer(cut, FIRST, make_sample, **CUT | {"token_ids": [8], "completion_tokens": 1})

    said = Accountant(cut).account()
    go_on(settings, max_tokens=9, dry_run=False)

    assert (said.truncated, said.tokens) == (3, 5 * 3)
    assert [prompt.unfinished.token_ids for prompt in cut.read_prompts(SECOND) if prompt.unfinished] == 3 * [[8, 9, 2]]


def test_what_a_process_left_that_died_in_asking_is_finished_by_the_next(cut: Run, settings: Settings) -> None:
    go_on(settings, max_tokens=8, dry_run=False)
    wanted = cut.read_prompts(FIRST)
    cut.storage.delete(f"run/prompts/{FIRST}.jsonl.gz")
    half_made = account(cut)

    mended = asking_again.mend(cut)

    assert half_made == (2, 3, 2, 1)
    assert mended == [FIRST]
    assert cut.read_prompts(FIRST) == wanted
    assert account(cut) == (2, 0, 2, 4)


def test_an_accountant_that_goes_on_says_what_a_fresh_one_says(
    cut: Run, settings: Settings, make_sample: MakeSample
) -> None:
    accountant = Accountant(cut)
    said: list[Accounting] = []
    for step in (
        lambda: go_on(settings, max_tokens=8, dry_run=False),
        lambda: answer(cut, FIRST, make_sample, **FAILED),
        lambda: go_on(settings, max_tokens=8, dry_run=False),
        lambda: answer(cut, SECOND, make_sample),
    ):
        step()
        said.append(accountant.account())
        assert said[-1] == Accountant(cut).account()

    assert [(one.truncated, one.pending, one.not_continued) for one in said] == [
        (0, 4, 0),
        (3, 1, 3),
        (0, 4, 0),
        (0, 1, 0),
    ]


def test_a_shard_that_cannot_be_read_is_told_and_the_others_go_on(cut: Run, settings: Settings) -> None:
    cut.storage.put(f"run/samples/{WHOLE}.parquet", b"no parquet")

    said = go_on(settings, max_tokens=8, dry_run=True)

    assert said["rows"] == 1
    assert said["left_out"] == {"in damaged shards": 1}


def test_a_cancelled_run_and_a_budget_of_nothing_are_refused(cut: Run, settings: Settings) -> None:
    with pytest.raises(SettingsError, match="--max-tokens 0"):
        go_on(settings, max_tokens=0, dry_run=True)
    cancel(settings, reason="")

    with pytest.raises(RunConflict, match="nothing of it is asked again"):
        go_on(settings, max_tokens=8, dry_run=False)


def test_the_verb_takes_the_run_and_the_budget_and_prints_one_line(cut: Run, settings: Settings) -> None:
    said = CliRunner().invoke(
        cli.app,
        ["continue", "run", "--max-tokens", "8", "--dry-run"],
        env=environment(settings) | {"DRAFTFLEET_RUN": "x"},
    )

    assert said.exit_code == 0
    assert json.loads(said.stdout) == {
        "run": "run",
        "dry_run": True,
        "rows": 3,
        "left_out": {},
        "failed_before": {},
    }
    assert "would continue" in said.stderr


def test_the_page_explains_every_reason_for_which_an_answer_is_left_out() -> None:
    page = (Path(__file__).parents[2] / "docs/continue.md").read_text()

    for reason in {reason for reason, _ in LEFT_OUT} | {"being asked", "in damaged shards"}:
        assert f"| `{reason}` |" in page
