"""What is asked next of a conversation, and where the source's tool results go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draftfleet.conversations import answers, merged
from draftfleet.records import Conversation, Prompt, Sample
from draftfleet.training_rows import rows_of
from workers.conversation import first, following, spliced, unfinished

MakeSample = Callable[..., Sample]


def says(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def call(name: str, identity: str | None = None, **arguments: Any) -> dict[str, Any]:
    written = "{" + ", ".join(f'"{key}": {value}' for key, value in arguments.items()) + "}"
    named = {} if identity is None else {"id": identity}
    return {**named, "type": "function", "function": {"name": name, "arguments": written}}


def result(text: str, identity: str | None = None, **more: Any) -> dict[str, Any]:
    return says("tool", text, **({} if identity is None else {"tool_call_id": identity}), **more)


def texts(messages: Conversation) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in messages]


def told(context: Conversation | str) -> list[tuple[str, str]]:
    assert isinstance(context, list), context
    return [(message["content"], message["tool_call_id"]) for message in context if message["role"] == "tool"]


def run_through(prompt: Prompt, make_sample: MakeSample, *given: dict[str, Any]) -> tuple[list[Prompt], Sample]:
    """Every turn as it was asked, and the conversation's sample."""
    asked = [first(prompt, None)]
    for number, fields in enumerate(given):
        sample = replace(
            make_sample(asked[-1], **({"content": f"T{number + 1}"} | fields)),
            row_key=prompt.row_key,
            turns=asked[-1].turns,
        )
        then = following(prompt, asked[-1], sample)
        if not isinstance(then, Prompt):
            return asked, replace(sample, ended=then)
        asked.append(then)
    raise AssertionError("the conversation goes on")


def test_each_turn_is_asked_on_the_answers_that_the_target_gave_before(make_sample: MakeSample) -> None:
    source = [
        says("system", "S"), says("user", "u1"), says("assistant", "A1"), says("user", "u2"),
        says("assistant", "A2"), says("user", "u3"),
    ]  # fmt: skip
    prompt = Prompt("p", "train", source)

    asked, sample = run_through(prompt, make_sample, {"reasoning": "hm"}, {}, {})

    assert [texts(one.messages) for one in asked] == [
        ["system: S", "user: u1"],
        ["system: S", "user: u1", "assistant: T1", "user: u2"],
        ["system: S", "user: u1", "assistant: T1", "user: u2", "assistant: T2", "user: u3"],
    ]
    assert asked[1].messages[2]["reasoning_content"] == "hm"
    assert "reasoning_content" not in asked[2].messages[4]
    assert sample.ended is None
    assert [row.content for row in rows_of(sample)] == ["T1", "T2", "T3"]
    assert [turn.message for turn in sample.turns] == [2, 4]


def test_roles_need_not_take_turns(make_sample: MakeSample) -> None:
    source = [
        says("assistant", "Hello, I am A."), says("user", "u1"), says("user", "u1b"), says("assistant", "A1"),
        says("assistant", "A1b"), says("system", "S"), says("user", "u2"),
    ]  # fmt: skip

    asked, sample = run_through(Prompt("p", "train", source), make_sample, {}, {})

    assert [texts(one.messages) for one in asked] == [
        ["assistant: Hello, I am A.", "user: u1", "user: u1b"],
        ["assistant: Hello, I am A.", "user: u1", "user: u1b", "assistant: T1", "system: S", "user: u2"],
    ]
    assert len(sample.turns) == 1


def test_an_answer_that_ends_inside_its_thought_has_a_text_in_the_history_and_not_null(
    make_sample: MakeSample,
) -> None:
    source = [says("user", "u1"), says("assistant", "A1"), says("user", "u2")]

    asked, sample = run_through(Prompt("p", "train", source), make_sample, {"reasoning": "hm", "content": None}, {})

    assert asked[1].messages[1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert [row.content for row in rows_of(sample)] == [None, "T2"]


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ("truncated", "the answer was cut at its length at turn 2 of 3"),
        ("failed", "the target gave no answer at turn 2 of 3"),
    ],
)
def test_a_turn_without_a_whole_answer_ends_the_conversation_and_the_turns_before_it_stay(
    make_sample: MakeSample, outcome: str, why: str
) -> None:
    source = [
        says("user", "u1"), says("assistant", "A1"), says("user", "u2"), says("assistant", "A2"), says("user", "u3")
    ]  # fmt: skip

    asked, sample = run_through(Prompt("p", "train", source), make_sample, {}, {"outcome": outcome})

    assert len(asked) == 2
    assert (sample.outcome, sample.ended) == (outcome, why)
    assert texts(sample.messages) == ["user: u1", "assistant: T1", "user: u2"]
    assert len(sample.turns) == 1


def test_the_last_turn_has_no_end_before_its_time_whatever_became_of_it(make_sample: MakeSample) -> None:
    source = [says("user", "u1"), says("assistant", "A1"), says("user", "u2")]

    _, sample = run_through(Prompt("p", "train", source), make_sample, {}, {"outcome": "truncated"})

    assert sample.ended is None


def test_what_is_left_of_a_conversation_is_asked_on_what_is_finished(make_sample: MakeSample) -> None:
    source = [
        says("user", "u1"), says("assistant", "A1"), says("user", "u2"), says("assistant", "A2"), says("user", "u3")
    ]  # fmt: skip
    prompt = Prompt("p", "train", source)
    asked, failed = run_through(prompt, make_sample, {}, {"outcome": "failed"})

    from_partial = first(prompt, unfinished(failed, asked[1]))
    again = Prompt.from_json(merged(prompt, failed).to_json())

    assert texts(again.messages) == ["user: u1", "assistant: T1", "user: u2", "assistant: A2", "user: u3"]
    assert again.row_key == prompt.row_key
    assert first(again, None) == from_partial == asked[1]
    _, whole = run_through(again, make_sample, {"content": "T2"}, {"content": "T3"})
    assert [row.content for row in rows_of(whole)] == ["T1", "T2", "T3"]


def test_a_tool_result_gets_the_id_of_the_call_that_the_target_made(make_sample: MakeSample) -> None:
    source = [
        says("user", "u1"), says("assistant", "", tool_calls=[call("add", "s1", a=1)]), result("2", "s1"),
        says("assistant", "A2"), says("user", "u2"),
    ]  # fmt: skip

    asked, sample = run_through(
        Prompt("p", "train", source), make_sample, {"content": None, "tool_calls": [call("add", "t1", a=1)]}, {}, {}
    )

    assert asked[1].messages[1]["tool_calls"] == [call("add", "t1", a=1)]
    assert asked[1].messages[2] == result("2", "t1")
    assert rows_of(sample)[0].tool_calls == [call("add", "t1", a=1)]


@pytest.mark.parametrize(
    ("theirs", "ours", "results", "expected"),
    [
        (
            [call("add", "s1"), call("sub", "s2")],
            [call("add", "t1"), call("sub", "t2")],
            [result("of sub", "s2"), result("of add", "s1")],
            [("of add", "t1"), ("of sub", "t2")],
        ),
        (
            [call("add", "s1"), call("sub", "s2")],
            [call("sub", "t1"), call("add", "t2")],
            [result("of add", "s1"), result("of sub", "s2")],
            [("of sub", "t1"), ("of add", "t2")],
        ),
        (
            [call("add", "s1", a=1, b=2), call("add", "s2", a=3)],
            [call("add", "t1", a=3), call("add", "t2", b=2, a=1)],
            [result("of 1", "s1"), result("of 3", "s2")],
            [("of 3", "t1"), ("of 1", "t2")],
        ),
        (
            [call("add", "s1", a=1), call("add", "s2", a=3)],
            [call("add", "t1", a=7), call("add", "t2", a=1)],
            [result("of 1", "s1"), result("of 3", "s2")],
            [("of 3", "t1"), ("of 1", "t2")],
        ),
        (
            [call("add"), call("sub")],
            [call("add", "t1"), call("sub", "t2")],
            [result("of sub", name="sub"), result("of add", name="add")],
            [("of add", "t1"), ("of sub", "t2")],
        ),
        (
            [call("add"), call("sub")],
            [call("add", "t1"), call("sub", "t2")],
            [result("of add"), result("of sub")],
            [("of add", "t1"), ("of sub", "t2")],
        ),
        (
            [call("add"), call("sub")],
            [call("add", "t1"), call("sub", "t2")],
            [result("of add", "x1"), result("of sub", "x2")],
            [("of add", "t1"), ("of sub", "t2")],
        ),
        (
            [call("add", "s1"), call("sub", "s2")],
            [call("add", "t1"), call("sub", "t2")],
            [result("of sub", "s2")],
            [("of sub", "t2")],
        ),
    ],
    ids=[
        "results in another order", "calls in another order", "one function twice: arguments", "then in order",
        "no ids: names", "no ids, no names: in order", "ids that no call has: in order", "a call without a result",
    ],
)  # fmt: skip
def test_tool_results_are_matched_to_the_calls_they_answer(
    theirs: Conversation, ours: Conversation, results: Conversation, expected: list[tuple[str, str]]
) -> None:
    context = spliced([*results, says("user", "next")], theirs, ours)

    assert told(context) == expected
    assert isinstance(context, list)
    assert context[-1] == says("user", "next")


@pytest.mark.parametrize(
    ("theirs", "ours", "results", "why"),
    [
        ([call("add", "s1")], [call("sub", "t1")], [result("2", "s1")], "tool calls differ"),
        ([call("add", "s1")], [], [result("2", "s1")], "tool calls differ"),
        ([], [call("add", "t1")], [], "tool calls differ"),
        ([call("add", "s1")], [call("add", "t1"), call("add", "t2")], [result("2", "s1")], "tool calls differ"),
        ([call("add", "s1")], [call("add", "t1")], [result("2", "s2")], "answer none of its calls"),
        ([call("add", "s1")], [call("add", "t1")], [result("2", "s1"), result("3", "s1")], "answer none of its calls"),
        ([], [], [result("2", "s1")], "answer none of its calls"),
    ],
)
def test_calls_that_do_not_stand_for_the_sources_are_told_from_those_that_do(
    theirs: Conversation, ours: Conversation, results: Conversation, why: str
) -> None:
    assert why in str(spliced(results, theirs, ours))


def test_a_conversation_whose_tool_calls_differ_ends_there_with_what_the_target_said(make_sample: MakeSample) -> None:
    source = [
        says("user", "u1"), says("assistant", "A1"), says("user", "u2"),
        says("assistant", "", tool_calls=[call("add", "s1")]), result("2", "s1"),
    ]  # fmt: skip

    asked, sample = run_through(Prompt("p", "train", source), make_sample, {}, {"content": "I would rather not."})

    assert len(asked) == 2
    assert sample.ended == "the target's tool calls differ from the source's at turn 2 of 3"
    assert sample.outcome == "ok"
    assert [row.content for row in rows_of(sample)] == ["T1", "I would rather not."]


def test_calls_without_ids_get_some(make_sample: MakeSample) -> None:
    source = [says("user", "u1"), says("assistant", "", tool_calls=[call("add", "s1")]), result("2", "s1")]

    asked, _ = run_through(
        Prompt("p", "train", source), make_sample, {"content": "", "tool_calls": [call("add"), ]}, {}
    )  # fmt: skip

    [made] = asked[1].messages[1]["tool_calls"]
    assert made["id"]
    assert asked[1].messages[2]["tool_call_id"] == made["id"]


def test_answers_are_counted_from_the_first_user_turn_and_neighbours_are_one() -> None:
    roles = ["system", "assistant", "user", "assistant", "assistant", "tool", "assistant", "user"]

    found = answers([says(role, "") for role in roles])

    assert found == [range(3, 5), range(6, 7)]
