"""What travels comes out as it went in, whatever a data set holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pyarrow as pa
import pytest

from draftfleet.errors import QueueError
from draftfleet.names import batch_id, parts_of
from draftfleet.records import SAMPLE_SCHEMA, SCHEMA_VERSION, Prompt, Sample, prompt_id
from draftfleet.wire import BatchMessage, TrainMessage

MakeSample = Callable[..., Sample]
MakePrompts = Callable[..., list[Prompt]]

BODY: dict[str, Any] = {"v": SCHEMA_VERSION, "run_id": "0" * 32, "run": "qwen3", "batch": "train-000123"}

MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"role": "user", "content": "Hello"},
    "empty text": {"role": "user", "content": ""},
    "empty text with another key": {"role": "user", "content": "", "weight": 1},
    "text that looks like JSON": {"role": "user", "content": "[1, 2", "weight": 1},
    "parts": {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {}}]},
    "a call without content": {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    "a call with null content": {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    "a tool's answer": {"role": "tool", "tool_call_id": "1", "name": "f", "content": "{}"},
    "a thought": {"role": "assistant", "content": "4", "reasoning_content": "2+2"},
    "a number as name": {"role": "user", "content": "x", "name": 5},
    "other scripts": {"role": "user", "content": "漢字 \u2028 🙂 \x00"},
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_a_message_of_any_form_survives_json_and_arrow(
    message: dict[str, Any], make_sample: MakeSample, make_prompts: MakePrompts
) -> None:
    prompt = Prompt("0" * 32, "train", [message], tools=[{"type": "function"}])
    sample = make_sample(prompt, tools=prompt.tools, tool_calls=[{"id": "a", "function": {"arguments": "{}"}}])

    table = pa.Table.from_pylist([sample.to_row()], SAMPLE_SCHEMA)

    assert Prompt.from_json(prompt.to_json()) == prompt
    assert Sample.from_json(sample.to_json()) == sample
    assert Sample.from_row(table.to_pylist()[0]) == sample


def test_columns_of_a_shard_are_the_fields_of_a_sample_and_whether_its_ids_match_usage() -> None:
    names = [field.name for field in fields(Sample)]

    assert sorted(SAMPLE_SCHEMA.names) == sorted([*names, "ids_match_usage"])


def test_a_prompt_id_is_the_hash_of_the_canonical_conversation() -> None:
    canonical = '[[{"content":"Grüße","role":"user"}],[]]'.encode()

    assert prompt_id([{"role": "user", "content": "Grüße"}], None) == hashlib.sha256(canonical).hexdigest()[:32]


def canonical_by_json(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> bytes:
    text = json.dumps([messages, tools or []], ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return text.encode()


def test_a_prompt_id_is_that_of_the_json_module_for_every_character_there_is() -> None:
    for first in range(0, 0x110000, 0x800):
        text = "".join(map(chr, range(first, first + 0x800)))
        if 0xD800 <= first < 0xE000:
            continue
        messages = [{"role": "user", "content": text}, {"content": f'"\\{text}', "role": text}]
        assert prompt_id(messages, None) == hashlib.sha256(canonical_by_json(messages)).hexdigest()[:32], hex(first)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_prompt_id_is_that_of_the_json_module_for_every_shape_of_message(name: str) -> None:
    messages = [{"role": "user", "content": "a"}, MESSAGES[name]]

    for tools in (None, [], [{"type": "function", "most": 2**70, "least": -0.0, "share": 1e16}]):
        wanted = hashlib.sha256(canonical_by_json(messages, tools)).hexdigest()[:32]
        assert prompt_id(messages, tools) == wanted


def test_half_a_surrogate_pair_has_no_prompt_id() -> None:
    for messages in ([{"role": "user", "content": "a\ud800b"}], [{"role": "user", "content": "\udfff", "name": "n"}]):
        with pytest.raises(UnicodeEncodeError):
            prompt_id(messages, None)


def test_a_prompt_id_depends_on_the_conversation_alone() -> None:
    asked = [{"role": "user", "content": "a"}]
    answered = [*asked, {"role": "assistant", "content": "b"}]

    assert prompt_id(asked, None) == prompt_id([{"content": "a", "role": "user"}], [])
    assert len({prompt_id(asked, None), prompt_id(answered, None), prompt_id(asked, [{"type": "function"}])}) == 3


def test_a_row_key_adds_sample_and_turn() -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    assert Prompt("p", "train", [{"role": "system", "content": "s"}, turn[0]]).row_key == "p-0-0"
    assert Prompt("p", "train", [*turn, turn[0]]).row_key == "p-0-1"


@pytest.mark.parametrize(
    ("source", "num_ids", "completion_tokens", "matches"),
    [("engine", 3, 3, True), ("retokenized", 3, 3, True), ("engine", 2, 3, False), ("none", 0, 0, False)],
)
def test_ids_match_usage_where_there_are_as_many_as_the_server_counted(
    make_sample: MakeSample,
    make_prompts: MakePrompts,
    source: str,
    num_ids: int,
    completion_tokens: int,
    matches: bool,
) -> None:
    sample = make_sample(
        make_prompts(1)[0], ids_source=source, token_ids=[1] * num_ids, completion_tokens=completion_tokens
    )

    assert sample.ids_match_usage is matches
    assert sample.to_row()["ids_match_usage"] is matches


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": ["text"]}, "prompts"),
        ({"run": "../elsewhere"}, "run"),
        ({"batch": ""}, "batch"),
        ({"batch": 7}, "batch"),
        ({"batch": "../train-000123"}, "batch"),
        ({"batch": "train-000123.row"}, "batch"),
        ({"run_id": "short"}, "run_id"),
        ({"v": "1"}, "v"),
        ({"v": SCHEMA_VERSION + 1}, f"version {SCHEMA_VERSION + 1}"),
    ],
)
def test_a_message_of_another_form_is_refused_with_what_is_wrong(change: dict[str, Any], said: str) -> None:
    with pytest.raises(QueueError) as error:
        BatchMessage.parse(BODY | change)

    assert said in str(error.value)


def test_messages_of_our_own_form_are_read() -> None:
    train = {key: value for key, value in BODY.items() if key != "batch"} | {"drafter": "eagle3"}

    assert BatchMessage.parse(BODY).batch == "train-000123"
    for batch in [batch_id("heldout", 7), batch_id("train", 12_345_678), parts_of("train-000123", 9)[8]]:
        assert BatchMessage.parse(BODY | {"batch": batch}).batch == batch
    assert TrainMessage.parse(train).drafter == "eagle3"
    assert len(BatchMessage.parse(BODY).model_dump_json()) < 1024
