"""Parts of an evaluation, and how sure each of them is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from draftfleet import tokens
from trainer.evaluation.asking import Asked
from trainer.evaluation.counts import DraftCount, acceptance, bucket, bucket_order, drafts_of, num_thinking, parts
from trainer.evaluation.intervals import of_ratio, student, wilson
from trainer.speculate import Answer

TINY = str(Path(__file__).parents[3] / "examples" / "tiny-target")


def test_a_draft_belongs_to_where_it_begins() -> None:
    asked = Asked([0] * 510, "c", turn=1, source="code")
    answer = Answer([7] * 9, [3, 3, 3], [2, 0, 3], starts=[1, 4, 5], chances=[[1, 1, 0], [0, 0, 0], [1, 1, 1]])

    drafts = drafts_of(asked, answer, num_thinking=5)

    assert [draft.position for draft in drafts] == [511, 514, 515]
    assert [draft.phase for draft in drafts] == ["thinking", "thinking", "answer"]
    by_context = parts(drafts, lambda draft: bucket(draft.position), 3)
    assert {name: one.acceptance_length for name, one in by_context.items()} == {"512-1k": 2.5, "<512": 3.0}
    assert parts(drafts, lambda draft: draft.source, 3)["code"] == acceptance(drafts, 3)
    assert acceptance(drafts, 3).acceptance_per_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert acceptance(drafts, 3).interval is None  # one conversation says nothing about others


def test_prompts_without_a_source_are_no_domain() -> None:
    def draft(source: str) -> DraftCount:
        return DraftCount("c", source, 0, 1, 5, "answer", 1, [])

    assert parts([draft("")], lambda one: one.source, 3) == {}
    assert set(parts([draft(""), draft("math")], lambda one: one.source, 3)) == {"no source", "math"}


def test_buckets_double_from_512_tokens_on() -> None:
    assert [bucket(position) for position in (0, 511, 512, 1023, 1024, 4096, 40_000)] == [
        "<512", "<512", "512-1k", "512-1k", "1k-2k", "4k-8k", "32k-64k",
    ]  # fmt: skip
    names = ["32k-64k", "<512", "1k-2k", "512-1k"]
    assert sorted(names, key=bucket_order) == ["<512", "512-1k", "1k-2k", "32k-64k"]


@pytest.mark.parametrize(
    ("prompt", "answer", "thought"),
    [
        ("<think>\n", "It is 7.</think>\n\n7", "It is 7.</think>"),
        ("", "<think>\nHm.\n</think>\n\nYes", "<think>\nHm.\n</think>"),
        ("", "Yes", ""),
        ("<think>\n", "It goes on", "It goes on"),
        ("", "<think>\nIt goes on", "<think>\nIt goes on"),
    ],
)
def test_a_thought_ends_with_its_mark(prompt: str, answer: str, thought: str) -> None:
    tokenizer = tokens.load(TINY)
    ids = tokenizer.encode(answer)

    number = num_thinking(tokenizer, tokenizer.encode(f"<|im_start|>assistant\n{prompt}"), ids)

    assert tokenizer.decode(ids[:number]).rstrip() == thought


def test_student_and_wilson_are_those_of_the_tables() -> None:
    assert [round(student(freedom), 2) for freedom in (1, 5, 15, 30, 120)] == [12.71, 2.57, 2.13, 2.04, 1.98]
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)


@pytest.mark.parametrize("conversations", [2, 4, 20])
def test_an_interval_holds_the_truth_19_times_in_20(conversations: int) -> None:
    """Conversations differ in how easy they are, and in length; the truth is what very many of them give."""
    dice = random.Random(conversations)

    def conversation() -> tuple[float, float]:
        easy, drafts = dice.betavariate(4, 4), dice.randrange(5, 60)
        return sum(dice.random() < easy for _ in range(drafts)), drafts

    held = 0
    for _ in range(600):
        interval = of_ratio([conversation() for _ in range(conversations)], most=1)
        assert interval is not None
        held += interval[0] <= 0.5 <= interval[1]

    assert 0.92 <= held / 600 <= 0.995


def test_two_that_came_out_alike_do_not_make_it_certain() -> None:
    low, high = of_ratio([(6, 10), (6, 10)], most=3) or (0, 0)

    assert low < 0.5
    assert 0.7 < high < 3
    assert of_ratio([(6, 10)], most=3) is None
    assert of_ratio([(6, 10), (0, 0)]) is None
