"""Answers as they come in: vLLM's events, SGLang's own, and what is no answer."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from draftfleet.errors import Transient
from workers.bench.counters import Acceptance
from workers.bench.streams import Answer


def taken(*events: dict[str, Any] | str) -> Answer:
    answer = Answer(time.perf_counter())
    for event in events:
        answer.take(f"data: {event if isinstance(event, str) else json.dumps(event)}")
        answer.take("")
    return answer


def chat(delta: dict[str, Any], ids: list[int], **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "token_ids": ids, "finish_reason": None}], **more}


def native(ids: list[int], tokens: int, **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"completion_tokens": tokens, "finish_reason": None, **meta}}


def test_vllm_s_events_are_put_together() -> None:
    answer = taken(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [5, 6]},
        chat({"reasoning": "So"}, [7]),
        chat({"content": "4"}, [8, 9]),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": [2]}]},
        {"choices": [], "usage": {"completion_tokens": 4}},
        "[DONE]",
    )

    assert (answer.prompt_ids, answer.ids, answer.text, answer.tokens) == ([5, 6], [7, 8, 9, 2], "So4", 4)
    assert (answer.finish_reason, answer.is_over) == ("stop", True)
    assert answer.acceptance is None
    assert answer.first_at is not None
    assert answer.last_at is not None
    assert answer.asked_at < answer.first_at < answer.last_at
    assert answer.inter_token_s == (answer.last_at - answer.first_at, 3)


def test_an_event_without_a_token_is_not_the_first_token() -> None:
    answer = taken({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})

    assert answer.first_at is None
    assert answer.inter_token_s == (0.0, 0)


@pytest.mark.parametrize("ids", [([7], [7, 8, 9]), ([7], [8, 9])], ids=["ids so far", "new ids alone"])
def test_sglang_s_own_events_tell_what_became_of_each_draft(ids: tuple[list[int], list[int]]) -> None:
    meta = {"spec_verify_ct": 4, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 12}

    answer = taken(
        native(ids[0], 1),
        native(ids[1], 3, **meta, spec_correct_drafts_histogram=[1, 1, 2, 0]) | {"text": "x"},
        "[DONE]",
    )

    assert (answer.ids, answer.tokens) == ([7, 8, 9], 3)
    assert answer.acceptance == Acceptance("answers", 4, 12, 5, (3, 2, 0))
    assert answer.acceptance.length == 2.25


def test_of_an_older_sglang_the_tokens_say_what_was_kept() -> None:
    """10 tokens: one of the prompt's pass, and nine of four passes, so five were drafted."""
    answer = taken(native(list(range(10)), 10, spec_verify_ct=4))

    assert answer.acceptance == Acceptance("answers", 4, None, 5, ())


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"error": {"message": "engine died"}}, "broke off its answer"),
        ("no JSON", "no part of an answer"),
        ("[1]", "no part of an answer"),
        ({"choices": [7]}, "no part of an answer"),
    ],
)
def test_what_is_no_answer_is_told(event: dict[str, Any] | str, said: str) -> None:
    with pytest.raises(Transient, match=said):
        taken(event)
