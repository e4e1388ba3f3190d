"""Fake servers that are asked with ids: they go on with what they said, whoever said it, and answer in their shape."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from draftfleet.testing import FakeServer, Remote

TINY_TARGET = Path(__file__).parents[2] / "examples/tiny-target"
CHAT = "/v1/chat/completions"


@pytest.fixture(params=[None, str(TINY_TARGET)], ids=["words", "tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture
def server(tokenizer: str | None) -> Iterator[FakeServer]:
    with FakeServer(model="tiny", tokenizer=tokenizer) as server:
        yield server


def post(server: Remote, path: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.loads(response.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def chat(server: Remote, text: str, max_tokens: int) -> tuple[list[int], list[int], str]:
    """Ids of the prompt and of the answer, and how it ended."""
    messages = [{"role": "user", "content": text}]
    _, body = post(server, CHAT, model="tiny", messages=messages, max_tokens=max_tokens, return_token_ids=True)
    choice = body["choices"][0]
    return body["prompt_token_ids"], choice["token_ids"], choice["finish_reason"]


def go_on(server: Remote, ids: list[int], max_tokens: int) -> tuple[list[int], str]:
    body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "return_token_ids": True}
    _, answer = post(server, "/v1/completions", **body)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    return choice["token_ids"], choice["finish_reason"]


def test_a_cut_answer_and_its_continuations_are_the_answer_that_was_not_cut(server: FakeServer) -> None:
    prompt, whole, ended = chat(server, "one", 400)
    _, cut, cut_ended = chat(server, "one", 9)

    middle, middle_ended = go_on(server, prompt + cut, 5)
    rest, rest_ended = go_on(server, prompt + cut + middle, 400)

    assert cut + middle + rest == whole
    assert (cut_ended, middle_ended, rest_ended) == ("length", "length", ended)
    assert (len(cut), len(middle)) == (9, 5)


def test_another_server_of_the_process_goes_on_too(server: FakeServer, tokenizer: str | None) -> None:
    prompt, whole, _ = chat(server, "two", 400)
    _, cut, _ = chat(server, "two", 9)

    with FakeServer(model="tiny", tokenizer=tokenizer) as other:
        rest, _ = go_on(other, prompt + cut, 400)

    assert cut + rest == whole


def test_an_answer_cut_by_order_in_its_thought_goes_on_to_its_end(server: FakeServer) -> None:
    prompt, whole, _ = chat(server, "three", 400)
    server.fault("cut_in_thought", times=1)
    _, cut, ended = chat(server, "three", 400)

    rest, rest_ended = go_on(server, prompt + cut, 400)

    assert (ended, rest_ended) == ("length", "stop")
    assert cut + rest == whole


def test_ids_that_nobody_said_get_an_answer_that_depends_on_them_alone(server: FakeServer) -> None:
    once, again, other = (go_on(server, ids, 400) for ids in ([1, 302, 201], [1, 302, 201], [1, 302, 202]))

    assert once == again
    assert once != other


@pytest.mark.parametrize(
    ("shape", "path", "body", "ids"),
    [
        ("sglang", "/generate", {"input_ids": [1, 302], "sampling_params": {"max_new_tokens": 9}}, "output_ids"),
        ("llamacpp", "/completion", {"prompt": [1, 302], "n_predict": 9, "return_tokens": True}, "tokens"),
    ],
)
def test_each_shape_takes_ids_at_its_own_address_and_nobody_elses(
    server: FakeServer, shape: str, path: str, body: dict[str, Any], ids: str
) -> None:
    asked_of_vllm = post(server, path, **body)[0]
    server.change(shape=shape)

    status, answer = post(server, path, **body)

    assert asked_of_vllm == 404
    assert post(server, "/v1/completions", model="tiny", prompt=[1])[0] == 404
    assert status == 200
    assert len(answer[ids]) == 9
    counts = answer.get("meta_info", answer)
    assert counts.get("completion_tokens", counts.get("tokens_predicted")) == 9
    end = answer.get("stop_type") or answer["meta_info"]["finish_reason"]["type"]
    assert end in ("limit", "length")


def test_the_text_of_ids_has_its_marks_and_faults_spoil_it(server: FakeServer) -> None:
    server.change(shape="llamacpp")
    body: dict[str, Any] = {"prompt": [1, 302], "n_predict": 400, "return_tokens": True}
    _, sound = post(server, "/completion", **body)
    server.fault("wrong_ids", times=1)
    _, wrong = post(server, "/completion", **body)
    server.fault("abort", times=1)
    _, aborted = post(server, "/completion", **body)

    assert sound["content"].startswith("<think>")
    assert "</think>" in sound["content"]
    assert len(sound["tokens"]) == sound["tokens_predicted"] == len(wrong["tokens"]) + 1
    assert aborted["stop_type"] == "none"


def test_a_prompt_that_is_no_list_of_ids_is_refused(server: FakeServer) -> None:
    assert post(server, "/v1/completions", model="tiny", prompt="text")[0] == 422
    assert post(server, "/v1/completions", model="tiny", prompt=[])[0] == 422
    assert post(server, "/v1/completions", model="tiny")[0] == 422


def test_a_text_in_the_ids_can_be_what_a_fault_waits_for() -> None:
    with FakeServer(model="tiny", tokenizer=str(TINY_TARGET)) as server:
        prompt, cut, _ = chat(server, "poison", 5)
        server.fault("status", status=500, contains="poison")

        assert post(server, "/v1/completions", model="tiny", prompt=prompt + cut)[0] == 500
        assert post(server, "/v1/completions", model="tiny", prompt=[1, 302])[0] == 200


def test_ollama_greets_and_counts_no_more_than_its_context() -> None:
    with FakeServer(model="tiny", shape="ollama", max_model_len=64) as server:
        messages = [{"role": "user", "content": "word " * 500}]

        status, body = post(server, CHAT, model="tiny", messages=messages, max_tokens=9)
        with urllib.request.urlopen(server.url, timeout=20) as response:
            greeting = response.read().decode()

    assert (status, body["usage"]["prompt_tokens"]) == (200, 64)
    assert greeting == "Ollama is running"
