"""Requests: every knob under the name that its engine knows, the history as it wants it, nothing dropped in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftfleet.errors import Mismatch
from draftfleet.settings import Sampling
from draftfleet.settings.asking import Variant
from draftfleet.tokens import TargetTokenizer
from workers import dialects
from workers.dialects import Ask, Dialect

USER: dict[str, Any] = {"role": "user", "content": "What is 3 + 4?"}
NATIVE = ["sglang-native", "llamacpp-native"]
CHAT = [name for name in dialects.DIALECTS if name not in NATIVE]
WITH_TEMPLATE = [name for name in CHAT if name not in ("ollama", "openai")]
KNOBS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "stop": ["END"],
}
NAMES = {
    "llamacpp": {"repetition_penalty": "repeat_penalty"},
    "llamacpp-native": {"repetition_penalty": "repeat_penalty"},
    "sglang-native": {"seed": "sampling_seed"},
}
REFUSED = {
    "transformers": {*KNOBS} - {"temperature", "top_p"},
    "ollama": {"top_k", "min_p", "repetition_penalty"},
}


def each(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dialect", list(map(dialects.load, names)), ids=names)


each_dialect = each(list(dialects.DIALECTS))


def asked(dialect: Dialect, sampling: Sampling, messages: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    return dialect.request(
        Ask(model="tiny", messages=messages or [USER], sampling=sampling, prompt_token_ids=[5, 6], **more)
    ).body


def knobs_of(body: dict[str, Any]) -> dict[str, Any]:
    return body.get("sampling_params", body)


@each_dialect
def test_a_request_says_what_is_set_and_nothing_else(dialect: Dialect) -> None:
    body = asked(dialect, Sampling(max_tokens=9))

    length = {"sglang-native": "max_new_tokens", "llamacpp-native": "n_predict"}.get(dialect.NAME, "max_tokens")
    text = {"skip_special_tokens", "spaces_between_special_tokens"}
    ids = {"return_token_ids", "return_tokens", "prompt", "input_ids", "sampling_params"}
    assert knobs_of(body)[length] == 9
    assert {*body, *knobs_of(body)} - ids - text - {length, "model", "messages"} == set()


@each_dialect
@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_is_sent_under_the_engines_name_or_refused(dialect: Dialect, knob: str) -> None:
    sampling = Sampling(max_tokens=9, **{knob: KNOBS[knob]})

    if knob in REFUSED.get(dialect.NAME, set()):
        with pytest.raises(Mismatch, match=rf"sampling\.{knob} = .*Leave it out"):
            asked(dialect, sampling)
        return
    body = knobs_of(asked(dialect, sampling))

    assert body[NAMES.get(dialect.NAME, {}).get(knob, knob)] == KNOBS[knob]


@each_dialect
def test_the_seed_of_the_row_is_sent(dialect: Dialect) -> None:
    body = knobs_of(asked(dialect, Sampling(max_tokens=9), seed=7))

    assert body[NAMES.get(dialect.NAME, {}).get("seed", "seed")] == 7


@pytest.mark.parametrize("name", ["sglang", "sglang-native"])
def test_all_tokens_are_top_k_minus_one_for_sglang(name: str) -> None:
    assert knobs_of(asked(dialects.load(name), Sampling(top_k=0)))["top_k"] == -1
    assert knobs_of(asked(dialects.load("vllm"), Sampling(top_k=0)))["top_k"] == 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_knob_that_only_some_rows_draw_is_refused_before_any(name: str) -> None:
    sampling = Sampling(mixture=[Variant(temperature=1.0), Variant(top_k=5)])

    with pytest.raises(Mismatch, match=r"sampling\.top_k = 5"):
        asked(dialects.load(name), sampling)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_can_be_sent_all_the_same(name: str) -> None:
    assert asked(dialects.load(name), Sampling(extra_body={"top_k": 5}))["top_k"] == 5


@each(CHAT)
def test_tools_are_sent(dialect: Dialect) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]

    assert asked(dialect, Sampling(), tools=tools)["tools"] == tools
    assert "tools" not in asked(dialect, Sampling(), tools=[])


@each(WITH_TEMPLATE)
def test_thinking_is_a_switch_of_the_template(dialect: Dialect) -> None:
    assert asked(dialect, Sampling(thinking=False))["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked(dialect, Sampling(thinking=True))["chat_template_kwargs"] == {"enable_thinking": True}


@each(WITH_TEMPLATE)
@pytest.mark.parametrize(("effort", "thinks"), [("low", True), ("none", False)])
def test_an_effort_reaches_the_template_and_switches_the_thinking(dialect: Dialect, effort: str, thinks: bool) -> None:
    sampling = Sampling(reasoning_effort=effort)

    body = asked(dialect, sampling)

    assert body["chat_template_kwargs"] == {"enable_thinking": thinks, "reasoning_effort": effort}
    assert body["chat_template_kwargs"] == sampling.template_kwargs


@each(["vllm", "sglang", "ollama", "openai"])
def test_an_effort_has_a_field_of_its_own_too(dialect: Dialect) -> None:
    assert asked(dialect, Sampling(reasoning_effort="low"))["reasoning_effort"] == "low"


def test_ollama_is_told_not_to_think_by_its_effort() -> None:
    assert asked(dialects.load("ollama"), Sampling(thinking=False))["reasoning_effort"] == "none"


@each(CHAT)
def test_extra_body_wins_and_leaves_the_thinking_switch(dialect: Dialect) -> None:
    extra = {"max_tokens": 3, "top_k": 20, "chat_template_kwargs": {"budget": 5}}

    body = asked(dialect, Sampling(max_tokens=9, thinking=True, extra_body=extra))

    assert body["max_tokens"] == 3
    assert body["top_k"] == 20
    switch = {} if dialect.NAME == "ollama" else {"enable_thinking": True}
    assert body["chat_template_kwargs"] == switch | {"budget": 5}


@each(NATIVE)
def test_extra_body_wins_where_the_prompt_is_ids_and_chat_fields_are_left_out(dialect: Dialect) -> None:
    extra = {"temperature": 0.1, "sampling_params": {"min_new_tokens": 2}, "chat_template_kwargs": {"budget": 5}}

    body = asked(dialect, Sampling(max_tokens=9, temperature=1.0, extra_body=extra))

    assert body["temperature"] == 0.1
    assert "chat_template_kwargs" not in body
    assert body["sampling_params"]["min_new_tokens"] == 2
    if dialect.NAME == "sglang-native":
        assert body["sampling_params"]["max_new_tokens"] == 9


@each(NATIVE)
def test_a_prompt_of_ids_needs_the_target(dialect: Dialect) -> None:
    with pytest.raises(Mismatch, match=r"target\.path is not set"):
        dialect.request(Ask(model="tiny", messages=[USER], sampling=Sampling()))


@each_dialect
def test_a_continuation_has_the_ids_the_rest_of_the_tokens_and_the_same_sampling(dialect: Dialect) -> None:
    sampling = Sampling(max_tokens=9, **({} if dialect.NAME in REFUSED else KNOBS), thinking=True)

    request = dialect.continuation(
        Ask(model="tiny", messages=[USER], sampling=sampling, seed=7, prompt_token_ids=[5, 6, 7])
    )

    if request is None:
        assert dialect.NAME in ("transformers", "ollama", "openai")
        return
    body = request.body
    assert body.get("prompt", body.get("input_ids")) == [5, 6, 7]
    params = knobs_of(body)
    assert 9 in (params.get("max_tokens"), params.get("max_new_tokens"), params.get("n_predict"))
    assert [params[name] for name in ("temperature", "top_k", "stop")] == [0.5, 20, ["END"]]
    assert not {"messages", "tools", "chat_template_kwargs"} & body.keys()


# -- history

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": "ä"}}}
HISTORY: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "7", "reasoning_content": "3 + 4", "tool_calls": None},
    USER,
    {"role": "assistant", "reasoning_content": "again", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
    {"role": "assistant", "content": None, "reasoning_content": "ended in its thought"},
    USER,
]
REASONING = {
    "vllm": {"reasoning", "reasoning_content"},
    "sglang": {"reasoning_content"},
    "llamacpp": {"reasoning_content"},
    "openai": {"reasoning_content"},
    "ollama": {"reasoning"},
}


@each(list(REASONING))
def test_earlier_reasoning_is_sent_back_under_the_names_that_its_engine_reads(dialect: Dialect) -> None:
    messages = asked(dialect, Sampling(), HISTORY)["messages"]

    for number, thought in ((1, "3 + 4"), (3, "again"), (5, "ended in its thought")):
        assert {name: value for name, value in messages[number].items() if "reasoning" in name} == dict.fromkeys(
            REASONING[dialect.NAME], thought
        )


def test_earlier_reasoning_goes_into_the_content_for_transformers_which_drops_it_elsewhere() -> None:
    messages = asked(dialects.load("transformers"), Sampling(), HISTORY)["messages"]

    assert messages[1]["content"] == "<think>\n3 + 4\n</think>\n\n7"
    assert messages[5]["content"] == "<think>\nended in its thought\n</think>\n\n"
    assert messages[3]["content"] is None
    assert not any("reasoning" in name for message in messages for name in message)


def test_a_thought_in_the_content_is_rendered_as_one_of_its_own(tokenizer: TargetTokenizer) -> None:
    told = [USER, {"role": "assistant", "content": "The sum is 7.", "reasoning_content": "3 + 4 = 7."}]

    sent = asked(dialects.load("transformers"), Sampling(), told)["messages"]

    assert tokenizer.prompt_ids(sent) == tokenizer.prompt_ids(told)
    assert tokenizer.prompt_ids(sent) != tokenizer.prompt_ids([USER, {"role": "assistant", "content": "The sum is 7."}])


@each(CHAT)
def test_arguments_of_tool_calls_are_json_text_on_the_wire(dialect: Dialect) -> None:
    messages = asked(dialect, Sampling(), HISTORY)["messages"]

    [call] = messages[3]["tool_calls"]
    assert isinstance(call["function"]["arguments"], str)
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "b": "ä"}
    assert (call["id"], call["function"]["name"]) == ("c1", "add")
    assert messages[4] == {"role": "tool", "tool_call_id": "c1", "content": "7"}
    assert HISTORY[3]["tool_calls"][0]["function"]["arguments"] == {"a": 3, "b": "ä"}


@each(CHAT)
def test_a_turn_has_a_text_or_calls_and_no_empty_fields(dialect: Dialect) -> None:
    messages = asked(dialect, Sampling(), HISTORY)["messages"]

    assert "tool_calls" not in messages[1]
    assert messages[3]["content"] is None
    assert isinstance(messages[5]["content"], str)


@each(CHAT)
def test_arguments_that_are_text_already_stay_as_the_model_wrote_them(dialect: Dialect) -> None:
    broken = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3,'}}

    messages = asked(dialect, Sampling(), [USER, {"role": "assistant", "content": "", "tool_calls": [broken]}])

    assert messages["messages"][1]["tool_calls"] == [broken]
