"""Every dialect against what real servers said. README.md beside this file says which servers, and what was not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet.errors import BadRequest, Mismatch, Overload, ServerError
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer
from workers import dialects
from workers.dialects import Ask, Completion, Dialect
from workers.dialects.openai import context_tokens

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 + 4?"}]
THOUGHT = "The numbers are 3 and 4.\nThe operation is add.\n3 + 4 = 7."
ANSWER = "The sum is 3 + 4 = **7**."
BEGUN = "<think>\nThe numbers are 3"
RECORDED = ["vllm", "llamacpp", "llamacpp-native", "transformers"]
WITH_IDS = ["vllm", "llamacpp-native"]
SOURCES = {
    "vllm": "reasoning",
    "llamacpp": "reasoning_content",
    "llamacpp-native": "think_tags",
    "transformers": "reasoning_content",
}
QUESTIONS = ["thinking", "not-thinking", "cut-in-thought", "cut-in-content"]
LIMITS = {"cut-in-thought": 8, "cut-in-content": 34}

each_recorded = pytest.mark.parametrize("name", RECORDED)

Recorded = Callable[[str, str], dict[str, Any]]


def read(name: str, recording: dict[str, Any]) -> Completion:
    return dialects.load(name).parse(recording["body"])


def refused(dialect: Dialect, answer: dict[str, Any]) -> ServerError:
    return dialect.classify(answer["status"], answer["headers"], json.dumps(answer["body"]))


def ask_of(question: str, tokenizer: TargetTokenizer) -> Ask:
    knobs = Sampling(max_tokens=LIMITS.get(question, 256), temperature=0, thinking=question != "not-thinking")
    ids = tokenizer.prompt_ids(MESSAGES, template_kwargs=knobs.template_kwargs)
    return Ask(model="tiny", messages=MESSAGES, sampling=knobs, seed=7, prompt_token_ids=ids)


@each_recorded
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_recorded_request_is_the_one_that_the_dialect_makes(
    name: str, question: str, recorded: Recorded, tokenizer: TargetTokenizer
) -> None:
    recording = recorded(name, question)

    path, body = dialects.load(name).request(ask_of(question, tokenizer))

    assert (path, body) == (recording["path"], recording["request"])


@each_recorded
def test_reasoning_content_and_counts_are_read(name: str, recorded: Recorded) -> None:
    answer = read(name, recorded(name, "thinking"))

    assert answer.outcome == "ok"
    assert answer.finish_reason == "stop"
    assert (answer.reasoning or "").strip() == THOUGHT
    assert answer.reasoning_source == SOURCES[name]
    assert (answer.content or "").strip() == ANSWER
    assert (answer.prompt_tokens, answer.completion_tokens) == (16, 40)
    assert answer.model == "tiny"


@each_recorded
def test_an_answer_without_a_thought_is_all_content(name: str, recorded: Recorded) -> None:
    answer = read(name, recorded(name, "not-thinking"))

    assert answer.outcome == "ok"
    assert answer.reasoning is None
    assert answer.reasoning_source is None
    assert (answer.content or "").strip() == ANSWER


@each_recorded
@pytest.mark.parametrize("question", ["cut-in-thought", "cut-in-content"])
def test_an_answer_cut_at_its_length_is_truncated_and_no_error(name: str, question: str, recorded: Recorded) -> None:
    answer = read(name, recorded(name, question))

    assert answer.outcome == "truncated"
    assert answer.finish_reason == "length"
    assert answer.reasoning
    assert bool(answer.content) == (question == "cut-in-content")


@pytest.mark.parametrize("name", WITH_IDS)
@pytest.mark.parametrize("question", [*QUESTIONS, "called", "history", "sampling"])
def test_ids_are_as_many_as_the_server_counts_and_spell_its_text(
    name: str, question: str, recorded: Recorded, tokenizer: TargetTokenizer
) -> None:
    answer = read(name, recorded(name, question))

    assert answer.token_ids is not None
    assert len(answer.token_ids) == answer.completion_tokens
    spelled = tokenizer.decode(answer.token_ids)
    assert (answer.reasoning or "") in spelled
    assert (answer.content or "") in spelled


@pytest.mark.parametrize("question", QUESTIONS)
def test_engines_that_give_ids_give_the_same(question: str, recorded: Recorded, tokenizer: TargetTokenizer) -> None:
    vllm, llamacpp = (read(name, recorded(name, question)) for name in WITH_IDS)

    assert vllm.token_ids == llamacpp.token_ids
    assert vllm.prompt_token_ids == ask_of(question, tokenizer).prompt_token_ids
    assert recorded("llamacpp-native", question)["request"]["prompt"] == vllm.prompt_token_ids


@each_recorded
@pytest.mark.parametrize("question", QUESTIONS)
def test_ids_made_from_the_text_are_those_that_the_engine_produced(
    name: str, question: str, recorded: Recorded, tokenizer: TargetTokenizer
) -> None:
    answer = read(name, recorded(name, question))

    ids = tokenizer.completion_ids(
        MESSAGES,
        reasoning=answer.reasoning,
        content=answer.content,
        finish_reason=answer.finish_reason,
        completion_tokens=answer.completion_tokens,
        thinking=question != "not-thinking",
    )

    assert ids == read("vllm", recorded("vllm", question)).token_ids


@pytest.mark.parametrize("name", ["vllm", "llamacpp", "llamacpp-native"])
def test_a_continuation_from_ids_is_the_rest_of_the_whole_answer(
    name: str, recorded: Recorded, tokenizer: TargetTokenizer
) -> None:
    recording = recorded(name, "continuation")
    ask, begun = ask_of("thinking", tokenizer), tokenizer.encode(BEGUN)
    wanted = Ask(
        model="tiny",
        messages=MESSAGES,
        sampling=ask.sampling,
        prompt_token_ids=[*(ask.prompt_token_ids or []), *begun],
    )

    made = dialects.load(name).continuation(wanted)
    rest = read(name, recording)

    assert made == (recording["path"], recording["request"])
    assert begun + (rest.token_ids or []) == read("vllm", recorded("vllm", "thinking")).token_ids
    assert (rest.prompt_tokens, rest.completion_tokens) == (16 + len(begun), 40 - len(begun))
    assert (rest.outcome, rest.content) == ("ok", ANSWER)


@pytest.mark.parametrize("name", ["vllm", "llamacpp", "llamacpp-native"])
def test_every_knob_was_taken_by_the_real_server(name: str, recorded: Recorded) -> None:
    recording = recorded(name, "sampling")

    answer = read(name, recording)

    assert recording["status"] == 200
    assert recording["request"]["top_k"] == 1
    assert (answer.content or "").strip() == "The sum is 3 + 4 ="  # ended by `stop`
    assert (answer.reasoning or "").strip() == THOUGHT


@each_recorded
@pytest.mark.parametrize(("question", "tokens"), [("called", 28), ("history", 40)])
def test_history_was_rendered_as_the_tokenizer_does(
    name: str, question: str, tokens: int, recorded: Recorded, tokenizer: TargetTokenizer
) -> None:
    messages = recorded("vllm", question)["request"]["messages"]

    answer = read(name, recorded(name, question))

    assert answer.prompt_tokens == tokens == len(tokenizer.prompt_ids(messages, thinking=True))
    assert (answer.content or "").strip() == ANSWER


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_another_model_is_the_servers_fault_and_not_the_rows(name: str, recorded: Recorded) -> None:
    error = refused(dialects.load(name), recorded(name, "other-model"))

    assert isinstance(error, Mismatch)
    assert not error.retryable


def test_llamacpp_answers_for_another_model_under_its_own_name(recorded: Recorded) -> None:
    assert recorded("llamacpp", "other-model")["request"]["model"] == "other"
    assert read("llamacpp", recorded("llamacpp", "other-model")).model == "tiny"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vllm", "maximum context length is 1024"),
        ("llamacpp", "exceed_context_size_error"),
        ("llamacpp-native", "exceed_context_size_error"),
    ],
)
def test_a_prompt_over_the_context_is_a_bad_request_with_status_and_body(
    name: str, said: str, recorded: Recorded
) -> None:
    error = refused(dialects.load(name), recorded(name, "too-long"))

    assert isinstance(error, BadRequest)
    assert error.status == 400
    assert said in error.body


def test_a_field_that_transformers_does_not_know_is_a_bad_request(recorded: Recorded) -> None:
    error = refused(dialects.load("transformers"), recorded("transformers", "unknown-field"))

    assert isinstance(error, BadRequest)
    assert error.status == 422
    assert "no_such_field" in str(error)


def test_transformers_leaves_the_stop_token_in_a_thought_that_ended_the_answer(recorded: Recorded) -> None:
    recording = recorded("transformers", "too-long")

    answer = read("transformers", recording)

    assert "<|im_end|>" in recording["body"]["choices"][0]["message"]["reasoning_content"]
    assert answer.outcome == "ok"
    assert "<|im_end|>" not in (answer.reasoning or "")


@pytest.mark.parametrize("name", ["vllm", "llamacpp", "transformers"])
def test_a_server_is_known_by_its_list_of_models(name: str, recorded: Recorded) -> None:
    models = recorded(name, "models")

    assert dialects.detect(models["body"], "", models["headers"]) == name


def test_vllm_is_known_by_its_gauges_where_its_models_are_renamed(recorded: Recorded) -> None:
    models = {"data": [{"id": "tiny", "object": "model", "owned_by": "me"}]}

    assert dialects.detect(models, recorded("vllm", "metrics")["body"], {}) == "vllm"


@pytest.mark.parametrize("name", ["vllm", "llamacpp"])
def test_the_context_is_told_by_the_list_of_models(name: str, recorded: Recorded) -> None:
    [entry] = recorded(name, "models")["body"]["data"]

    assert context_tokens(entry) == 1024


# -- from sources, not run


@pytest.mark.parametrize("question", ["chat-0.5.23", "chat-main"])
def test_ids_of_sglang_are_read_under_either_name(question: str, recorded: Recorded) -> None:
    answer = read("sglang", recorded("sglang", question))

    assert answer.token_ids == [2046, 201, 287, 2047, 25, 2]
    assert answer.prompt_token_ids == [1, 302, 2]
    assert (answer.reasoning, answer.reasoning_source, answer.content) == ("a", "reasoning_content", "b")
    assert len(answer.token_ids) == answer.completion_tokens


@pytest.mark.parametrize("name", ["sglang", "sglang-native"])
def test_an_answer_of_generate_is_read(name: str, recorded: Recorded) -> None:
    whole, cut = (read(name, recorded("sglang", question)) for question in ("generate", "generate-cut"))

    assert (whole.outcome, whole.reasoning, whole.content) == ("ok", "a", "b")
    assert whole.token_ids == [2046, 201, 287, 2047, 25, 2]
    assert (whole.prompt_tokens, whole.completion_tokens) == (3, 6)
    assert (cut.outcome, cut.finish_reason, cut.reasoning, cut.content) == ("truncated", "length", "a", None)


@pytest.mark.parametrize("name", ["sglang", "sglang-native"])
def test_errors_of_sglang_are_read(name: str, recorded: Recorded) -> None:
    too_long, full = (refused(dialects.load(name), recorded("sglang", what)) for what in ("too-long", "queue-full"))

    assert isinstance(too_long, BadRequest)
    assert "context length" in too_long.body
    assert isinstance(full, Overload)


def test_every_folder_of_recordings_is_read_here_and_told_of() -> None:
    here = Path(__file__).parent
    folders = {path.parent.name for path in here.glob("*/*.json")}

    assert folders == {*RECORDED, "sglang"}
    assert all(f"`{name}`" in (here / "README.md").read_text() for name in folders)
