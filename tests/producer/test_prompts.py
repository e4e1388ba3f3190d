"""One conversation, many shapes, one prompt; and each way in which a row is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from producer.prompts import COLUMNS, Malformed, Rejected, Rules, overlap_text, read_prompt

RULES = Rules(column=None, split_column=None, heldout=0.5)
PAGE = (Path(__file__).parents[2] / "docs" / "data-sets.md").read_text()
EXAMPLES = re.findall(r"```json row\n(.*?)\n```\n```json asked\n(.*?)\n```", PAGE, re.DOTALL)

ASK = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}


@pytest.mark.parametrize(("row", "asked"), EXAMPLES, ids=[row[:40] for row, _ in EXAMPLES])
def test_each_shape_on_the_page_is_asked_as_the_page_says(row: str, asked: str) -> None:
    assert read_prompt(json.loads(row), RULES).messages == json.loads(asked)


def test_the_page_shows_a_shape_for_every_column() -> None:
    text = PAGE.partition("## Where the conversation is")[2].partition("\n\n### ")[0]

    assert re.findall(r"`(\w+)`", text.partition(" that is there")[0]) == list(COLUMNS)
    assert {"messages", "conversations", "prompt", "question", "instruction", "turns"} <= {
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


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        [json.dumps(CALL)],
        [[CALL]],
        [{**CALL, "function": {"name": "look", "arguments": {"at": "it"}}}],
        [{"id": "c", "name": "look", "arguments": {"at": "it"}}],
        [{**CALL, "function": {**CALL["function"], "strict": None}}, None],  # type: ignore[dict-item]
    ],
)
def test_tool_calls_of_every_kind_are_asked_in_one_form(calls: object) -> None:
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": calls}, ASK]

    assert read_prompt({"messages": turns}, RULES).messages[1]["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [[TOOL]], [TOOL["function"]], [TOOL, [], None]]
)
def test_tools_of_every_kind_are_asked_in_one_form(tools: object) -> None:
    assert read_prompt({"messages": [ASK], "tools": tools}, RULES).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]", [[]], [None], "null"])
def test_no_tools_are_none_however_they_are_written(tools: object) -> None:
    assert read_prompt({"messages": [ASK], "tools": tools}, RULES) == read_prompt({"messages": [ASK]}, RULES)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_the_history_is_kept_under_one_name(key: str) -> None:
    thought = {"role": "assistant", "content": None, key: "Because."}

    messages = read_prompt({"messages": [ASK, thought, ASK]}, RULES).messages

    assert messages[1] == {"role": "assistant", "content": "", "reasoning_content": "Because."}


def test_an_answer_without_content_costs_nothing_since_it_is_left_out() -> None:
    assert read_prompt({"messages": [ASK, {"role": "assistant", "content": None}]}, RULES).messages == [ASK]


def test_turns_need_not_alternate() -> None:
    turns = [ASK, ASK, ANSWER, ANSWER, {"role": "tool", "content": "x"}, ASK]

    assert read_prompt({"messages": turns}, RULES).messages == turns


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}


@pytest.mark.parametrize(
    ("row", "media"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, PICTURE]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "video"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "audio"),
        ({"image": "x.jpg", "conversations": [{"from": "human", "value": "What?"}]}, "image"),
        ({"images": ["x.jpg"], "prompt": "What?"}, "image"),
        ({"image": None, "prompt": "What is in <image> here?"}, "image"),
        ({"prompt": "<image>\nWhat?"}, "image"),
        ({"audio": {"bytes": b"x"}, "prompt": "What?"}, "audio"),
    ],
)
def test_what_is_no_text_is_rejected_by_its_name(row: dict[str, Any], media: str) -> None:
    with pytest.raises(Rejected, match="only text can be asked") as caught:
        read_prompt(row, RULES)
    assert caught.value.reason == media


def test_a_text_about_images_is_a_text() -> None:
    for row in ({"prompt": "What does <image> mean in SVG?"}, {"image": "", "images": [], "prompt": "What?"}):
        assert read_prompt(row, RULES).messages[0]["role"] == "user"


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "Why?", "input": ""}, "Why?"),
        ({"instruction": "Sum up.", "input": "Long text.", "output": "Short."}, "Sum up.\n\nLong text."),
        ({"instruction": "Sum up.", "context": "Long text.", "response": "Short."}, "Sum up.\n\nLong text."),
        ({"problem": "1 + 1", "solution": "2"}, "1 + 1"),
        ({"query": "1 + 1", "response": "2"}, "1 + 1"),
        ({"input": "1 + 1", "output": "2"}, "1 + 1"),
        ({"question": "1 + 1", "system_prompt": None}, "1 + 1"),
    ],
)
def test_a_question_is_found_in_the_columns_that_data_sets_use(row: dict[str, Any], asked: str) -> None:
    assert read_prompt(row, RULES).messages == [{"role": "user", "content": asked}]


def test_every_text_of_a_list_is_asked_where_every_turn_is() -> None:
    rules = Rules(column=None, split_column=None, heldout=0, turns="all")
    row = {"turns": ["One?", "Two?", "Three?"]}

    assert [message["role"] for message in read_prompt(row, rules).messages] == ["user", "assistant"] * 2 + ["user"]
    assert [message["content"] for message in read_prompt(row, RULES).messages] == ["One?"]


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
