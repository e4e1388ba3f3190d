"""Answers and refusals as no recording has them: every way to answer badly, read the same by every dialect."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from draftfleet.errors import BadRequest, Overload, ServerError, SettingsError, Transient, Unauthorized
from workers import dialects
from workers.dialects import Dialect

NATIVE = ["sglang-native", "llamacpp-native"]


def each(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dialect", list(map(dialects.load, names)), ids=names)


each_dialect = each(list(dialects.DIALECTS))
each_of_chat = each([name for name in dialects.DIALECTS if name not in NATIVE])


def completion(message: dict[str, Any], finish_reason: str | None = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"model": "tiny", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}


@each_of_chat
@pytest.mark.parametrize(
    ("message", "reasoning", "source", "content"),
    [
        ({"reasoning": "a", "content": "b"}, "a", "reasoning", "b"),
        ({"reasoning_content": "a", "content": "b"}, "a", "reasoning_content", "b"),
        ({"reasoning": "a", "reasoning_content": "c", "content": "b"}, "a", "reasoning", "b"),
        ({"reasoning": None, "reasoning_content": "a", "content": "b"}, "a", "reasoning_content", "b"),
        ({"content": "<think>\na\n</think>\n\nb"}, "a", "think_tags", "b"),
        ({"content": "a\n</think>\n\nb"}, "a", "think_tags", "b"),
        ({"content": "<think>\na"}, "a", "think_tags", None),
        ({"content": "<think>\n\n</think>\n\nb"}, None, None, "b"),
        ({"content": "b"}, None, None, "b"),
        ({"content": None, "reasoning": "a"}, "a", "reasoning", None),
    ],
)
def test_reasoning_is_found_wherever_it_stands(
    dialect: Dialect, message: dict[str, Any], reasoning: str | None, source: str | None, content: str | None
) -> None:
    answer = dialect.parse(completion(message))

    assert (answer.reasoning, answer.reasoning_source, answer.content) == (reasoning, source, content)


@each_of_chat
@pytest.mark.parametrize(
    ("finish_reason", "outcome"),
    [("stop", "ok"), ("tool_calls", "ok"), ("length", "truncated"), ("content_filter", "truncated")],
)
def test_how_an_answer_ended_decides_its_outcome_even_without_content(
    dialect: Dialect, finish_reason: str, outcome: str
) -> None:
    answer = dialect.parse(completion({"content": None, "reasoning": "a"}, finish_reason))

    assert answer.outcome == outcome


@each_of_chat
@pytest.mark.parametrize("finish_reason", ["abort", "error", None])
def test_an_answer_broken_off_on_http_200_is_asked_again(dialect: Dialect, finish_reason: str | None) -> None:
    with pytest.raises(Transient, match="broke the answer off"):
        dialect.parse(completion({"content": "a"}, finish_reason))


@each_dialect
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"message": None, "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": ["a"]}, "finish_reason": "stop"}]},
        {"error": {"message": "engine is dead"}},
    ],
    ids=str,
)
def test_a_body_that_is_no_completion_is_asked_again(dialect: Dialect, body: dict[str, Any]) -> None:
    with pytest.raises(Transient, match="no chat completion"):
        dialect.parse(body)


@pytest.mark.parametrize("raw", [b"", b"<html>", b"[1]", b'{"choices": [', b"\xff\xfe"])
def test_a_body_that_is_no_json_is_asked_again(raw: bytes) -> None:
    with pytest.raises(Transient, match="no JSON object"):
        dialects.decode(raw)


@pytest.mark.parametrize("raw", [b'{"a": ["\\ud83d, \\ud83d\\ude00"]}', b'{"a": ["\xed\xa0\xbd, \xf0\x9f\x98\x80"]}'])
def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_is_kept(raw: bytes) -> None:
    [text] = dialects.decode(raw)["a"]

    assert text.endswith(", \N{GRINNING FACE}")
    assert text.startswith("\N{REPLACEMENT CHARACTER}")
    assert text.encode()


@pytest.mark.parametrize("ids", [["7"], [None], [1.5], [2**31]])
@pytest.mark.parametrize("field", ["token_ids", "response_token_ids", "output_ids", "tokens"])
def test_token_ids_that_are_none_are_asked_for_again(field: str, ids: list[Any]) -> None:
    meta = {"finish_reason": {"type": "stop"}}
    name, body = {
        "token_ids": ("vllm", completion({"content": "a"})),
        "response_token_ids": ("sglang", completion({"content": "a"})),
        "output_ids": ("sglang-native", {"text": "a", "meta_info": meta}),
        "tokens": ("llamacpp-native", {"content": "a", "stop_type": "eos"}),
    }[field]
    (body["choices"][0] if "choices" in body else body)[field] = ids

    with pytest.raises(Transient, match="token ids"):
        dialects.load(name).parse(body)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("sglang-native", {"text": "a", "meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}}),
        ("sglang-native", {"text": "a", "meta_info": {"finish_reason": None}}),
        ("llamacpp-native", {"content": "a", "stop_type": "none"}),
    ],
)
def test_an_answer_of_ids_broken_off_on_http_200_is_asked_again(name: str, body: dict[str, Any]) -> None:
    with pytest.raises(Transient, match="broke the answer off"):
        dialects.load(name).parse(body)


@each(NATIVE)
@pytest.mark.parametrize(
    "body", [{}, {"text": 3, "meta_info": {}}, {"content": ["a"], "stop_type": "eos"}, {"choices": []}]
)
def test_a_body_that_is_no_answer_of_ids_is_asked_again(dialect: Dialect, body: dict[str, Any]) -> None:
    with pytest.raises(Transient, match="no chat completion"):
        dialect.parse(body)


def test_the_engines_own_versions_name_the_reasoning_differently_and_both_are_read() -> None:
    old = dialects.load("vllm").parse(completion({"reasoning_content": "a", "content": "b"}))
    new = dialects.load("vllm").parse(completion({"reasoning": "a", "content": "b"}))

    assert (old.reasoning, old.content) == (new.reasoning, new.content) == ("a", "b")
    assert (old.reasoning_source, new.reasoning_source) == ("reasoning_content", "reasoning")


def test_llamacpp_leaves_line_breaks_around_its_thought() -> None:
    answer = dialects.load("llamacpp").parse(completion({"reasoning_content": "a\n", "content": "b"}))

    assert answer.reasoning == "a"


def test_transformers_names_a_hub_model_with_its_revision() -> None:
    answer = dialects.load("transformers").parse({**completion({"content": "a"}), "model": "org/model@main"})

    assert answer.model == "org/model"


@each_of_chat
def test_counts_that_are_not_given_are_minus_one(dialect: Dialect) -> None:
    answer = dialect.parse({**completion({"content": "a"}), "usage": None})

    assert (answer.prompt_tokens, answer.completion_tokens) == (-1, -1)
    assert answer.token_ids is None


@each_dialect
@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, BadRequest, False),
        (404, BadRequest, False),
        (413, BadRequest, False),
        (422, BadRequest, False),
        (401, Unauthorized, False),
        (403, Unauthorized, False),
        (429, Overload, True),
        (503, Overload, True),
        (408, Transient, True),
        (500, Transient, True),
        (502, Transient, True),
        (504, Transient, True),
        (302, Transient, True),
    ],
)
def test_a_status_decides_whether_the_row_is_asked_again(
    dialect: Dialect, status: int, kind: type[ServerError], retryable: bool
) -> None:
    error = dialect.classify(status, {}, "no")

    assert type(error) is kind
    assert error.retryable is retryable
    assert str(status) in str(error)


@each_dialect
def test_retry_after_is_read_as_seconds_and_as_a_date(dialect: Dialect) -> None:
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    long_ago = format_datetime(datetime(2001, 2, 3, tzinfo=UTC), usegmt=True)

    def wait(value: str) -> float | None:
        error = dialect.classify(429, {"retry-after": value}, "")
        assert isinstance(error, Overload)
        return error.retry_after_s

    assert wait("7") == 7
    assert wait("0.5") == 0.5
    assert wait(in_a_minute) == pytest.approx(60, abs=5)
    assert wait(long_ago) == 0
    assert wait("-3") == 0
    assert wait("soon") is None
    assert wait("nan") is None


@each_dialect
def test_a_refusal_shows_the_start_of_a_long_body(dialect: Dialect) -> None:
    error = dialect.classify(400, {}, "x" * 100_000)

    assert isinstance(error, BadRequest)
    assert len(str(error)) < 1000


def test_every_dialect_of_the_table_has_its_own_name() -> None:
    assert [dialects.load(name).NAME for name in dialects.DIALECTS] == list(dialects.DIALECTS)


def test_an_unknown_dialect_lists_the_known_ones() -> None:
    known = ", ".join(dialects.DIALECTS)

    with pytest.raises(SettingsError, match=re.escape(f"'vlm': no such dialect; known are {known}, and auto")):
        dialects.load("vlm")


@pytest.mark.parametrize(
    ("entry", "metrics", "greeting", "name"),
    [
        ({"owned_by": "vllm"}, "", "", "vllm"),
        ({"owned_by": "me"}, "vllm:num_requests_running 0.0\n", "", "vllm"),
        ({"owned_by": "sglang"}, "", "", "sglang"),
        ({"owned_by": "me"}, "# HELP\nsglang:num_running_reqs 0.0\n", "", "sglang"),
        ({"owned_by": "llamacpp"}, "", "", "llamacpp"),
        ({"owned_by": "llamacpp", "status": {"value": "loaded"}}, "", "", "llamacpp"),
        ({"owned_by": "local", "status": {"value": "loaded"}}, "", "", "transformers"),
        ({"owned_by": "library"}, "", "", "ollama"),
        ({"owned_by": "somebody"}, "", "Ollama is running", "ollama"),
        ({"owned_by": "somebody"}, "", "<html>", "openai"),
    ],
)
def test_a_server_is_known_by_what_it_says_before_it_is_asked(
    entry: dict[str, Any], metrics: str, greeting: str, name: str
) -> None:
    models = {"data": [{"id": "tiny", "object": "model", **entry}]}

    assert dialects.detect(models, metrics, {}, greeting) == name


def test_what_lists_no_models_is_not_known() -> None:
    assert dialects.detect({"detail": "Not Found"}, "", {}) is None


def test_every_unsuitable_dialect_is_one_that_can_be_forced() -> None:
    assert dialects.UNSUITABLE.keys() <= dialects.DIALECTS.keys()
    assert all(f'worker.dialect = "{name}"' in why for name, why in dialects.UNSUITABLE.items())
