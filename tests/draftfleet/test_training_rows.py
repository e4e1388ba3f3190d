"""A sample as the rows that a drafter is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draftfleet.records import Prompt, Sample, Turn
from draftfleet.training_rows import rows_of

CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "", "reasoning_content": "thought", "tool_calls": CALLS},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]


@pytest.fixture
def sample(make_sample: Callable[..., Sample]) -> Sample:
    prompt = Prompt("p", "train", MESSAGES)
    turn = Turn(message=1, prompt_token_ids=[1], token_ids=[2, 3], ids_source="engine", completion_tokens=2)
    return make_sample(prompt, turns=[turn], reasoning="hm", content="Two.")


def test_each_turn_has_its_own_prefix_ids_and_answer(sample: Sample) -> None:
    first, last = rows_of(sample)

    assert (first.messages, first.prompt_token_ids, first.token_ids) == (MESSAGES[:1], [1], [2, 3])
    assert (first.reasoning, first.content, first.tool_calls) == ("thought", None, CALLS)
    assert (last.messages, last.prompt_token_ids, last.token_ids) == (MESSAGES, [5, 6, 7], [8, 9, 2])
    assert (last.reasoning, last.content, last.tool_calls) == ("hm", "Two.", None)
    assert [(row.turn, row.outcome, row.ids_match_usage) for row in (first, last)] == [(0, "ok", True), (1, "ok", True)]


def test_a_turn_keeps_its_key_as_its_conversation_grows(sample: Sample) -> None:
    alone = rows_of(replace(sample, turns=[]))
    grown = rows_of(sample)

    assert [row.key for row in alone] == ["p-0-0"]
    assert [row.key for row in grown] == ["p-0-0", "p-0-0.1"]


def test_a_failed_sample_gives_its_finished_turns_and_no_row_of_its_own(sample: Sample) -> None:
    rows = rows_of(replace(sample, outcome="failed"))

    assert [row.key for row in rows] == ["p-0-0"]
    assert rows_of(replace(sample, outcome="failed", turns=[])) == []


def test_ids_are_held_against_usage_turn_by_turn(sample: Sample) -> None:
    wrong = replace(sample.turns[0], completion_tokens=3)

    rows = rows_of(replace(sample, turns=[wrong]))

    assert [row.ids_match_usage for row in rows] == [False, True]
