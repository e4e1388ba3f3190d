"""One conversation, many shapes, one prompt; and each way in which a row is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from producer.prompts import Malformed, Rejected, Rules, overlap_text, read_prompt

RULES = Rules(column=None, split_column=None, heldout=0.5)
PAGE = (Path(__file__).parents[2] / "docs" / "producing.md").read_text()
EXAMPLES = re.findall(r"```json row\n(.*?)\n```\n```json asked\n(.*?)\n```", PAGE, re.DOTALL)

ASK = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}


@pytest.mark.parametrize(("row", "asked"), EXAMPLES, ids=[row[:40] for row, _ in EXAMPLES])
def test_each_shape_on_the_page_is_asked_as_the_page_says(row: str, asked: str) -> None:
    assert read_prompt(json.loads(row), RULES).messages == json.loads(asked)


def test_the_page_shows_a_shape_for_every_column() -> None:
    assert {"messages", "conversations", "prompt", "question"} <= {
        key for row, _ in EXAMPLES for key in json.loads(row)
    }


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, ANSWER]},
        {"messages": json.dumps([ASK, ANSWER])},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {"conversations": [ASK, ANSWER]},
        {"prompt": [ASK, {"role": "Model", "content": "Because.", "weight": 1}]},
        {"messages": [{**ASK, "name": None, "tool_calls": None}, {**ANSWER, "tool_calls": []}], "tools": []},
        {"messages": None, "conversations": [ASK, ANSWER], "system": "  "},
    ],
)
def test_the_same_conversation_has_the_same_id_in_every_shape(row: dict[str, Any]) -> None:
    assert read_prompt(row, RULES) == read_prompt({"messages": [ASK, ANSWER]}, RULES)


def test_the_id_tells_answers_and_tools_apart_though_the_same_is_asked() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    rows: list[dict[str, Any]] = [
        {"messages": [ASK]},
        {"messages": [ASK, ANSWER]},
        {"messages": [ASK, {**ANSWER, "content": "No reason."}]},
        {"messages": [ASK], "tools": [tool]},
    ]

    prompts = [read_prompt(row, RULES) for row in rows]

    assert len({prompt.prompt_id for prompt in prompts}) == len(rows)
    assert all(prompt.messages == [ASK] for prompt in prompts)
    assert prompts[3].tools == [tool]


def test_nulls_that_parquet_fills_in_are_as_good_as_absent() -> None:
    def tool(name: str, **properties: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, ASK]
    padded = [{**turn, "tool_calls": turn.get("tool_calls"), "name": None} for turn in turns]

    read = read_prompt({"messages": padded, "tools": [tool("a", x={"type": "string"}, y=None)]}, RULES)

    assert read == read_prompt({"messages": turns, "tools": [tool("a", x={"type": "string"})]}, RULES)
    assert read.messages[1] == turns[1]


def test_a_system_turn_of_the_conversation_wins_over_the_column() -> None:
    own = {"role": "system", "content": "Mine."}

    assert read_prompt({"messages": [own, ASK], "system": "Other."}, RULES).messages == [own, ASK]


def test_the_named_column_is_read_though_a_known_one_is_there() -> None:
    rules = Rules(column="instruction", split_column=None, heldout=0)

    assert read_prompt({"instruction": "Why?", "prompt": "Not this."}, rules).messages == [ASK]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": " \n"}, "empty prompt"),
        ({"messages": [ASK, ANSWER, {"role": "user", "content": ""}]}, "empty prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}, "empty prompt"),
        ({"messages": [{"role": "user", "content": []}]}, "empty prompt"),
        ({"messages": []}, "no user turn"),
        ({"messages": [{"role": "system", "content": "Be."}, ANSWER]}, "no user turn"),
        ({"messages": [{"role": "narrator", "content": "Once"}]}, "unknown role"),
    ],
)
def test_a_conversation_that_cannot_be_asked_is_rejected_with_the_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Rejected, match=f"^{reason}: ") as caught:
        read_prompt(row, RULES)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"text": "Why?"}, "it has none of messages, conversations, prompt, question"),
        ({"prompt": 7}, "prompt is a number, neither a text nor a list of messages"),
        ({"messages": ["Why?"]}, "message 1 is a text, not an object"),
        ({"messages": "Why?"}, "messages is a text that is not JSON"),
        ({"messages": [{"content": "Why?"}]}, "message 1 has no role"),
        ({"messages": [ASK, {"role": "assistant"}, ASK]}, r"message 2 \(assistant\) has no content"),
        ({"messages": [{"role": "user", "content": 7}]}, "the content of message 1 is a number"),
        ({"messages": [{"role": "user", "content": ["Why?"]}]}, "is a list, neither a text nor a list of objects"),
        ({"messages": [{**ASK, "name": 7}]}, "name of message 1 is a number"),
        ({"prompt": "Why?", "tools": "[{"}, "tools is a text that is not JSON"),
        ({"prompt": "Why?", "tools": {"a": 1}}, "tools is an object, not a list of objects"),
        ({"prompt": "Why?", "system": ["a"]}, "system is a list"),
        ({"prompt": "half \ud83d a pair"}, "half a surrogate pair"),
        ({"prompt": "Why?", "tools": [{"raw": b"x"}]}, "something that JSON cannot"),
        ({"prompt": "Why?", "split": "training"}, "split is 'training'; known are train, heldout"),
        ({"prompt": "Why?", "split": 1}, "split is 1"),
    ],
)
def test_a_row_of_a_wrong_shape_says_what_is_wrong(row: dict[str, Any], wrong: str) -> None:
    with pytest.raises(Malformed, match=wrong):
        read_prompt(row, RULES)


@pytest.mark.parametrize(
    ("value", "split"), [("train", "train"), ("Test", "heldout"), ("held-out", "heldout"), ("validation", "heldout")]
)
def test_a_split_column_decides(value: str, split: str) -> None:
    named = Rules(column=None, split_column="part", heldout=0)

    assert read_prompt({"prompt": "Why?", "split": value}, RULES).split == split
    assert read_prompt({"prompt": "Why?", "part": value}, named).split == split


def test_a_named_split_column_must_say_something_in_every_row() -> None:
    with pytest.raises(Malformed, match="it has no part"):
        read_prompt({"prompt": "Why?", "split": "train"}, Rules(column=None, split_column="part", heldout=0))


def test_the_hash_holds_out_the_share_that_is_asked_for_and_a_larger_share_keeps_it() -> None:
    def heldout(share: float) -> set[str]:
        rules = Rules(column=None, split_column=None, heldout=share)
        prompts = [read_prompt({"prompt": f"Question {number}"}, rules) for number in range(4000)]
        return {prompt.prompt_id for prompt in prompts if prompt.split == "heldout"}

    tenth, fifth = heldout(0.1), heldout(0.2)

    assert not heldout(0)
    assert 320 < len(tenth) < 480  # 400 expected, standard deviation 19
    assert tenth < fifth


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is  Zürich?", "what is\nZÜRICH", True),
        ("Don't stop!", "dont stop", False),
        ("3 + 4", "3 + 5", False),
        ("?!", "!?", False),
    ],
)
def test_overlap_ignores_case_punctuation_and_white_space(one: str, other: str, same: bool) -> None:
    earlier = [{"role": "user", "content": "Hello"}, ANSWER]

    keys = [
        overlap_text([*earlier, {"role": "user", "content": one}]),
        overlap_text([{"role": "user", "content": other}]),
    ]

    assert (keys[0] == keys[1]) is same
