"""Every dialect against what real servers said (dialects/, made by record.py), and against every way to answer badly.

The recordings: vLLM 0.32 and transformers serve 5.24 with examples/tiny-target. `openai` has none of its own: it has to
make do with anybody's.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from draftfleet.errors import (
    BadRequest,
    Mismatch,
    Overload,
    ServerError,
    SettingsError,
    Transient,
    Unauthorized,
)
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer, load
from workers import dialects
from workers.dialects import Ask, Dialect

RECORDED = Path(__file__).parent / "dialects"
TINY_TARGET = Path(__file__).parents[2] / "examples/tiny-target"
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
THOUGHT = "The numbers are 3 and 4.\nThe operation is add.\n3 + 4 = 7."

each_dialect = pytest.mark.parametrize(
    "dialect", list(map(dialects.load, dialects.DIALECTS)), ids=list(dialects.DIALECTS)
)
each_recorded = pytest.mark.parametrize("name", ["vllm", "transformers"])


def recorded(name: str, question: str) -> dict[str, Any]:
    return json.loads((RECORDED / name / f"{question}.json").read_text())


def asked(dialect: Dialect, sampling: Sampling, **more: Any) -> dict[str, Any]:
    return dialect.request(Ask(model="tiny", messages=MESSAGES, sampling=sampling, **more)).body


def refused(dialect: Dialect, answer: dict[str, Any]) -> ServerError:
    return dialect.classify(answer["status"], answer["headers"], json.dumps(answer["body"]))


def completion(message: dict[str, Any], finish_reason: str | None = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"model": "tiny", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}


@pytest.fixture(scope="module")
def tokenizer() -> TargetTokenizer:
    return load(TINY_TARGET)


# -- what real servers said


@each_recorded
def test_a_recorded_request_is_the_one_that_the_dialect_makes(name: str) -> None:
    recording = recorded(name, "thinking")

    body = asked(dialects.load(name), Sampling(max_tokens=256, temperature=0, thinking=True))

    assert body == recording["request"]


@each_recorded
def test_reasoning_content_and_counts_are_read(name: str) -> None:
    answer = dialects.load(name).parse(recorded(name, "thinking")["body"])

    assert answer.outcome == "ok"
    assert answer.finish_reason == "stop"
    assert (answer.reasoning or "").strip() == THOUGHT
    assert answer.reasoning_source == {"vllm": "reasoning", "transformers": "reasoning_content"}[name]
    assert (answer.content or "").strip() == "The sum is 3 + 4 = **7**."
    assert (answer.prompt_tokens, answer.completion_tokens) == (16, 40)
    assert answer.model == "tiny"


@each_recorded
def test_an_answer_without_a_thought_is_all_content(name: str) -> None:
    answer = dialects.load(name).parse(recorded(name, "not-thinking")["body"])

    assert answer.outcome == "ok"
    assert answer.reasoning is None
    assert answer.reasoning_source is None
    assert (answer.content or "").strip() == "The sum is 3 + 4 = **7**."


@each_recorded
@pytest.mark.parametrize("question", ["cut-in-thought", "cut-in-content"])
def test_an_answer_cut_at_its_length_is_truncated_and_no_error(name: str, question: str) -> None:
    answer = dialects.load(name).parse(recorded(name, question)["body"])

    assert answer.outcome == "truncated"
    assert answer.finish_reason == "length"
    assert answer.reasoning
    assert bool(answer.content) == (question == "cut-in-content")


@pytest.mark.parametrize("question", ["thinking", "not-thinking", "cut-in-thought", "cut-in-content"])
def test_ids_of_vllm_are_as_many_as_it_counts_and_spell_its_text(question: str, tokenizer: TargetTokenizer) -> None:
    answer = dialects.load("vllm").parse(recorded("vllm", question)["body"])

    assert answer.token_ids is not None
    assert len(answer.token_ids) == answer.completion_tokens
    spelled = tokenizer.decode(answer.token_ids)
    assert (answer.reasoning or "") in spelled
    assert (answer.content or "") in spelled
    assert answer.prompt_token_ids == tokenizer.prompt_ids(MESSAGES, thinking=question != "not-thinking")


@each_recorded
@pytest.mark.parametrize("question", ["thinking", "not-thinking", "cut-in-thought", "cut-in-content"])
def test_ids_made_from_the_text_are_those_that_the_engine_produced(
    name: str, question: str, tokenizer: TargetTokenizer
) -> None:
    answer = dialects.load(name).parse(recorded(name, question)["body"])

    ids = tokenizer.completion_ids(
        MESSAGES,
        reasoning=answer.reasoning,
        content=answer.content,
        finish_reason=answer.finish_reason,
        completion_tokens=answer.completion_tokens,
        thinking=question != "not-thinking",
    )

    engine = dialects.load("vllm").parse(recorded("vllm", question)["body"])
    assert ids == engine.token_ids


@each_recorded
def test_another_model_is_the_servers_fault_and_not_the_rows(name: str) -> None:
    error = refused(dialects.load(name), recorded(name, "other-model"))

    assert isinstance(error, Mismatch)
    assert not error.retryable


def test_a_prompt_over_the_context_is_a_bad_request_with_status_and_body() -> None:
    error = refused(dialects.load("vllm"), recorded("vllm", "too-long"))

    assert isinstance(error, BadRequest)
    assert error.status == 400
    assert "maximum context length is 1024" in error.body


def test_a_field_that_transformers_does_not_know_is_a_bad_request() -> None:
    error = refused(dialects.load("transformers"), recorded("transformers", "unknown-field"))

    assert isinstance(error, BadRequest)
    assert error.status == 422
    assert "no_such_field" in str(error)


def test_transformers_leaves_the_stop_token_in_a_thought_that_ended_the_answer() -> None:
    answer = dialects.load("transformers").parse(recorded("transformers", "too-long")["body"])

    assert "<|im_end|>" in recorded("transformers", "too-long")["body"]["choices"][0]["message"]["reasoning_content"]
    assert answer.outcome == "ok"
    assert "<|im_end|>" not in (answer.reasoning or "")


def test_transformers_names_a_hub_model_with_its_revision() -> None:
    answer = dialects.load("transformers").parse({**completion({"content": "a"}), "model": "org/model@main"})

    assert answer.model == "org/model"


@each_recorded
def test_a_server_is_known_by_its_list_of_models(name: str) -> None:
    models = recorded(name, "models")

    assert dialects.detect(models["body"], "", models["headers"]) == name


def test_vllm_is_known_by_its_gauges_where_its_models_are_renamed() -> None:
    models = {"data": [{"id": "tiny", "object": "model", "owned_by": "me"}]}

    assert dialects.detect(models, recorded("vllm", "metrics")["body"], {}) == "vllm"
    assert dialects.detect(models, "sglang:num_running_reqs 0.0\n", {}) == "openai"


def test_what_lists_no_models_is_not_known() -> None:
    assert dialects.detect({"detail": "Not Found"}, "", {}) is None


# -- what every dialect does


@each_dialect
def test_a_request_says_what_is_set_and_nothing_else(dialect: Dialect) -> None:
    body = asked(dialect, Sampling(max_tokens=9))

    ids = {"return_token_ids"} if dialect.GIVES_TOKEN_IDS else set()
    assert body.keys() - ids == {"model", "messages", "max_tokens"}


@each_dialect
def test_a_request_carries_sampling_tools_and_seed(dialect: Dialect) -> None:
    sampling = Sampling(max_tokens=9, temperature=0.5, top_p=0.9, thinking=False)
    tools = [{"type": "function", "function": {"name": "add"}}]

    body = asked(dialect, sampling, tools=tools, seed=7)

    assert body["temperature"] == 0.5
    assert body["top_p"] == 0.9
    assert body["seed"] == 7
    assert body["tools"] == tools
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


@each_dialect
def test_extra_body_wins_and_leaves_the_thinking_switch(dialect: Dialect) -> None:
    extra = {"max_tokens": 3, "top_k": 20, "chat_template_kwargs": {"budget": 5}}

    body = asked(dialect, Sampling(max_tokens=9, thinking=True, extra_body=extra))

    assert body["max_tokens"] == 3
    assert body["top_k"] == 20
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "budget": 5}


@each_dialect
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


@each_dialect
@pytest.mark.parametrize(
    ("finish_reason", "outcome"),
    [("stop", "ok"), ("tool_calls", "ok"), ("length", "truncated"), ("content_filter", "truncated")],
)
def test_how_an_answer_ended_decides_its_outcome_even_without_content(
    dialect: Dialect, finish_reason: str, outcome: str
) -> None:
    answer = dialect.parse(completion({"content": None, "reasoning": "a"}, finish_reason))

    assert answer.outcome == outcome


@each_dialect
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
def test_token_ids_that_are_none_are_asked_for_again(ids: list[Any]) -> None:
    body = completion({"content": "a"})
    body["choices"][0]["token_ids"] = ids

    with pytest.raises(Transient, match="token ids"):
        dialects.load("vllm").parse(body)


@each_dialect
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
    with pytest.raises(SettingsError, match=re.escape("'vlm': no such dialect; known are vllm, transformers, openai")):
        dialects.load("vlm")
