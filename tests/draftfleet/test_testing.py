"""The fake server does what it is told: what a test sees of a fault is what a client would see of the real one."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, get_args
from urllib.error import HTTPError

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from draftfleet.errors import SettingsError
from draftfleet.testing import FakeProcess, FakeServer, Remote, command
from draftfleet.testing.behaviour import Kind, Shape
from draftfleet.tokens import load

TINY_TARGET = Path(__file__).parents[2] / "examples/tiny-target"
BROKEN_OFF = (http.client.HTTPException, ConnectionError, TimeoutError)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(model="tiny") as server:
        yield server


def get(server: Remote, path: str) -> tuple[int, dict[str, str], bytes]:
    return _open(urllib.request.Request(server.url + path))


def ask(
    server: Remote, text: str = "hello", *, key: str = "", timeout_s: float = 20, **fields: Any
) -> tuple[int, dict[str, str], bytes]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 500, **fields}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    return _open(request, timeout_s)


def _open(request: urllib.request.Request, timeout_s: float = 20) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, dict(response.headers), response.read()
    except HTTPError as error:
        return error.code, dict(error.headers), error.read()


def answered(server: Remote, text: str = "hello", **fields: Any) -> dict[str, Any]:
    status, _, raw = ask(server, text, **fields)
    assert status == 200, raw
    return json.loads(raw)


def gauges(server: Remote) -> dict[str, float]:
    """Every sample of /metrics, as a Prometheus server reads it."""
    families = text_string_to_metric_families(get(server, "/metrics")[2].decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def message(body: dict[str, Any]) -> dict[str, Any]:
    return body["choices"][0]["message"]


def until(holds: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)


# -- what a healthy one says


def test_an_answer_depends_on_the_prompt_alone(server: FakeServer) -> None:
    first = answered(server, "a")
    other = answered(server, "b")
    with FakeProcess(model="tiny") as restarted:
        again = answered(restarted, "a")

    assert message(again) == message(first)
    assert message(other) != message(first)
    assert again["usage"] == first["usage"]


def test_ids_are_as_many_as_the_count_and_come_where_they_are_asked_for(server: FakeServer) -> None:
    with_ids = answered(server, return_token_ids=True)
    without = answered(server)

    assert len(with_ids["choices"][0]["token_ids"]) == with_ids["usage"]["completion_tokens"]
    assert len(with_ids["prompt_token_ids"]) == with_ids["usage"]["prompt_tokens"]
    assert "token_ids" not in without["choices"][0]


def test_every_word_without_a_tokenizer_is_one_id(server: FakeServer) -> None:
    body = answered(server, return_token_ids=True)

    words = len(message(body)["reasoning"].split()) + len(message(body)["content"].split())
    assert body["usage"]["completion_tokens"] == words + 3  # the thought's two marks, and the stop token


def test_lengths_differ_around_their_mean_and_are_all_the_same_without_spread(server: FakeServer) -> None:
    server.change(tokens=40, spread=0.5)
    spread = [answered(server, str(i))["usage"]["completion_tokens"] for i in range(200)]
    server.change(spread=0)
    same = {answered(server, str(i))["usage"]["completion_tokens"] for i in range(20)}

    assert len(set(spread)) > 20
    assert 34 < sum(spread) / len(spread) < 46
    assert same == {40}


def test_an_answer_longer_than_max_tokens_is_cut(server: FakeServer) -> None:
    in_content = answered(server, max_tokens=30, return_token_ids=True)
    in_thought = answered(server, max_tokens=4, return_token_ids=True)

    assert in_content["choices"][0]["finish_reason"] == in_thought["choices"][0]["finish_reason"] == "length"
    assert len(in_content["choices"][0]["token_ids"]) == 30
    assert message(in_content)["content"]
    assert message(in_thought)["content"] is None
    assert message(in_thought)["reasoning"]


def test_thinking_can_be_switched_off(server: FakeServer) -> None:
    body = answered(server, chat_template_kwargs={"enable_thinking": False})

    assert "reasoning" not in message(body)
    assert message(body)["content"]


@pytest.mark.parametrize("shape", ["vllm", "transformers"])
def test_with_a_tokenizer_the_ids_are_real(shape: str) -> None:
    tokenizer = load(TINY_TARGET)

    with FakeServer(shape=shape, model="tiny", tokenizer=str(TINY_TARGET)) as server:
        fields = {"return_token_ids": True} if shape == "vllm" else {}
        body = answered(server, "What is 3 + 4?", **fields)

    asked = [{"role": "user", "content": "What is 3 + 4?"}]
    ids = tokenizer.completion_ids(
        asked,
        reasoning=message(body).get("reasoning") or message(body).get("reasoning_content"),
        content=message(body)["content"],
        finish_reason="stop",
        completion_tokens=body["usage"]["completion_tokens"],
    )
    assert len(ids) == body["usage"]["completion_tokens"]
    assert body["usage"]["prompt_tokens"] == len(tokenizer.prompt_ids(asked))
    if shape == "vllm":
        assert ids == body["choices"][0]["token_ids"]
        assert body["prompt_token_ids"] == tokenizer.prompt_ids(asked)


def test_each_shape_has_its_reasoning_where_the_real_server_has_it(server: FakeServer) -> None:
    vllm = message(answered(server))
    server.change(shape="transformers")
    transformers = message(answered(server))
    server.change(shape="openai")
    openai = message(answered(server))

    assert vllm["reasoning"] == transformers["reasoning_content"]
    assert openai["content"].startswith(f"<think>\n{vllm['reasoning']}\n</think>\n\n")
    assert openai.keys() == {"role", "content"}


def test_each_shape_refuses_as_the_real_server_does(server: FakeServer) -> None:
    server.change(max_model_len=600)

    assert ask(server, model="other")[0] == 404
    assert ask(server, "word " * 200)[0] == 400
    server.change(shape="transformers")
    assert ask(server, model="other")[0] == 400
    assert ask(server, return_token_ids=True)[0] == 422
    assert get(server, "/metrics")[0] == 404
    assert get(server, "/version")[0] == 404


def test_models_health_and_version_are_those_of_a_server_that_is_up(server: FakeServer) -> None:
    server.change(max_model_len=600)

    status, headers, raw = get(server, "/v1/models")

    assert status == 200
    assert headers["Server"] == "uvicorn"
    assert (
        json.loads(raw)["data"][0] | {"id": "tiny", "max_model_len": 600, "owned_by": "vllm"}
        == json.loads(raw)["data"][0]
    )
    assert get(server, "/health")[0] == 200
    assert json.loads(get(server, "/version")[2])["version"]


def test_a_key_is_asked_for_where_one_is_set(server: FakeServer) -> None:
    server.change(api_key="secret")

    assert ask(server)[0] == 401
    assert ask(server, key="wrong")[0] == 401
    assert ask(server, key="secret")[0] == 200


def test_gauges_show_who_runs_and_who_waits_for_a_slot(server: FakeServer) -> None:
    server.change(slots=2, latency_s=30)

    with ThreadPoolExecutor(5) as clients:
        waiting = [clients.submit(ask, server, str(i), timeout_s=60) for i in range(5)]
        until(lambda: server.stats()["waiting"] == 3)
        gauges = get(server, "/metrics")[2].decode()
        seen = server.stats()
        server.change(slots=3)
        until(lambda: server.stats()["waiting"] == 2)
        server.change(alive=False)
        for client in waiting:
            assert isinstance(client.exception(60), BROKEN_OFF)

    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0' in gauges
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0' in gauges
    assert seen["in_flight"] == seen["peak_in_flight"] == 2


def test_a_client_that_goes_away_leaves_its_slot(server: FakeServer) -> None:
    server.change(slots=1, latency_s=30)

    with pytest.raises(BROKEN_OFF):
        ask(server, timeout_s=0.2)
    until(lambda: server.stats()["in_flight"] == 0)
    server.change(latency_s=0)

    assert ask(server)[0] == 200


def test_rows_are_counted_by_their_last_question(server: FakeServer) -> None:
    server.fault("status", status=500, contains="twice", times=1)

    for text in ("once", "twice", "twice"):
        ask(server, text)

    rows = server.stats()["rows"]
    assert rows["once"]["requests"] == rows["once"]["answered"] == 1
    assert (rows["twice"]["requests"], rows["twice"]["answered"]) == (2, 1)
    assert server.stats()["tokens"] == rows["once"]["tokens"] + rows["twice"]["tokens"]
    assert server.stats()["statuses"] == {"200": 2, "500": 1}


# -- how each server is imitated


NAMES = {
    "vllm": {
        "vllm:num_requests_running": 2.0,
        "vllm:num_requests_waiting": 1.0,
        "vllm:kv_cache_usage_perc": 0.035,
        "vllm:num_preemptions_total": 0.0,
        "vllm:generation_tokens_total": 0.0,
        "vllm:request_success_total": 0.0,
    },
    "sglang": {
        "sglang:num_running_reqs": 2.0,
        "sglang:num_queue_reqs": 1.0,
        "sglang:token_usage": 0.035,
        "sglang:num_retracted_requests_total": 0.0,
        "sglang:generation_tokens_total": 0.0,
        "sglang:num_requests_total": 0.0,
        "sglang:spec_accept_length": 0.0,
    },
    "llamacpp": {
        "llamacpp:requests_processing": 2.0,
        "llamacpp:requests_deferred": 1.0,
        "llamacpp:tokens_predicted_total": 0.0,
    },
}


@pytest.mark.parametrize("shape", NAMES)
def test_the_gauges_of_each_shape_parse_under_the_names_of_the_real_server(shape: Shape) -> None:
    with (
        FakeServer(shape=shape, model="tiny", slots=2, kv_tokens=400, latency_s=60) as server,
        ThreadPoolExecutor(3) as clients,
    ):
        for _ in range(3):  # prompts of 7 tokens, of which two are in the cache
            clients.submit(ask, server, timeout_s=60)
        until(lambda: server.stats()["waiting"] == 1)
        seen = gauges(server)
        server.change(alive=False)

    assert seen == NAMES[shape]


def test_an_answer_of_sglang_has_its_ids_in_the_choice_and_its_thought_in_its_own_field(server: FakeServer) -> None:
    vllm = answered(server, return_token_ids=True)
    server.change(shape="sglang")
    sglang = answered(server, return_token_ids=True)
    choice = sglang["choices"][0]

    assert message(sglang)["reasoning_content"] == message(vllm)["reasoning"]
    assert choice["response_token_ids"] == vllm["choices"][0]["token_ids"]
    assert choice["prompt_token_ids"] == vllm["prompt_token_ids"]
    assert "response_token_ids" not in answered(server)["choices"][0]
    assert json.loads(get(server, "/v1/models")[2])["data"][0]["owned_by"] == "sglang"


def test_sglang_and_llamacpp_answer_under_any_name(server: FakeServer) -> None:
    for shape, name in (("sglang", "whatever"), ("llamacpp", "tiny")):
        server.change(shape=shape)
        assert answered(server, model="whatever")["model"] == name


def test_sglang_and_llamacpp_refuse_what_is_too_long_in_their_own_words(server: FakeServer) -> None:
    server.change(shape="sglang", max_model_len=510)
    sglang = ask(server, "one two three four five six seven")
    server.change(shape="llamacpp", max_model_len=10)
    llamacpp = ask(server, "word " * 200)

    assert sglang[0] == llamacpp[0] == 400
    assert json.loads(sglang[2])["object"] == "error"
    assert "maximum context length of 510" in json.loads(sglang[2])["message"]
    error = json.loads(llamacpp[2])["error"]
    assert (error["type"], error["code"], error["n_ctx"]) == ("exceed_context_size_error", 400, 10)


def test_an_answer_of_llamacpp_has_no_ids_and_an_empty_text_where_it_ended_in_its_thought(server: FakeServer) -> None:
    server.change(shape="llamacpp")
    server.fault("cut_in_thought")

    body = answered(server, return_token_ids=True)

    assert message(body)["content"] == ""
    assert message(body)["reasoning_content"]
    assert "token_ids" not in body["choices"][0]
    assert get(server, "/health")[1]["Server"] == "llama.cpp"


@pytest.mark.parametrize("shape", get_args(Shape))
def test_a_loading_server_and_a_fault_are_answered_in_the_shape(shape: Shape) -> None:
    with FakeServer(shape=shape, model="tiny", ready=False) as server:
        loading = json.loads(ask(server)[2])
        server.change(ready=True, faults=[{"kind": "status", "status": 429}])
        refused = json.loads(ask(server)[2])

    inner = {"transformers": "detail", "sglang": "message"}.get(shape)
    assert (loading[inner] if inner else loading["error"]["message"]) == "Loading model"
    assert (refused[inner] if inner else refused["error"]["message"]) == "ordered fault"


# -- how long it takes


def test_the_same_prompt_has_the_same_length_on_every_server_and_none_is_over_the_cap() -> None:
    lengths = {"model": "tiny", "tokens": 100, "spread": 0.9, "most_tokens": 150}
    texts = [f"Question {number}?" for number in range(60)]

    with FakeServer(**lengths) as one, FakeProcess(shape="sglang", speed=0.5, **lengths) as other:
        of_one = [answered(one, text)["usage"]["completion_tokens"] for text in texts]
        of_other = [answered(other, text)["usage"]["completion_tokens"] for text in texts]

    assert of_one == of_other
    assert max(of_one) == 150
    assert len(set(of_one)) > 20


def test_requests_that_overfill_the_cache_are_preempted_counted_and_answered() -> None:
    with FakeServer(model="tiny", tokens=100, spread=0, kv_tokens=150, seconds_per_token=0.003) as server:
        with ThreadPoolExecutor(4) as clients:
            bodies = list(clients.map(lambda number: answered(server, str(number)), range(4)))
        stats = server.stats()
        seen = gauges(server)

    assert [body["usage"]["completion_tokens"] for body in bodies] == [100] * 4
    assert stats["preemptions"] > 0
    assert seen["vllm:num_preemptions_total"] == stats["preemptions"]
    assert seen["vllm:generation_tokens_total"] == stats["tokens"] == 400


def test_tokens_count_while_they_are_made_and_a_change_of_speed_holds_from_then_on(server: FakeServer) -> None:
    server.change(tokens=1000, spread=0, seconds_per_token=1.0, time_scale=100)

    with ThreadPoolExecutor(1) as clients:
        client = clients.submit(answered, server, max_tokens=1000)
        until(lambda: gauges(server)["vllm:generation_tokens_total"] > 5)
        assert server.stats()["tokens"] == 0
        server.change(time_scale=100_000)
        client.result(60)

    assert server.stats()["tokens"] == 1000


def test_it_reports_how_late_its_answers_were(server: FakeServer) -> None:
    server.change(latency_s=0.01)
    for number in range(20):
        ask(server, str(number))

    lag = server.stats()["reply_lag_s"]

    assert lag["answers"] == 20
    assert 0 < lag["mean"] <= lag["p99"] <= lag["max"] < 20


# -- what a sick one does


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_fault_strikes_and_is_counted(server: FakeServer, kind: Kind) -> None:
    sound = answered(server, return_token_ids=True)
    server.fault(kind, times=1, restart_s=0.1)

    with ThreadPoolExecutor(1) as clients:
        client = clients.submit(ask, server, timeout_s=60, return_token_ids=True)
        until(lambda: server.stats()["faults"] == {kind: 1})
        if kind in ("hang", "ghost", "stall"):
            until(lambda: server.stats()["requests"] == 2)
            assert not client.done()
            server.change(faults=[], frozen=False)
        error = client.exception(60)
        answer = None if error else client.result()

    if answer is None:
        assert isinstance(error, BROKEN_OFF)
    elif kind == "stall":
        assert message(json.loads(answer[2])) == message(sound)
    else:
        assert answer[0] != 200 or not answer[2].startswith(b"{") or _plain(json.loads(answer[2])) != _plain(sound)


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    """What is the same of two sound answers to one prompt."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_a_crash_can_come_back_by_itself_with_its_gauges_at_zero(server: FakeServer) -> None:
    server.change(load_s=10, time_scale=100)
    ask(server)
    server.fault("die", times=1, restart_s=10)

    with pytest.raises(BROKEN_OFF):
        ask(server)
    until(lambda: is_up(server))

    assert gauges(server)["vllm:generation_tokens_total"] == 0
    assert server.stats()["generated_tokens"] == server.stats()["tokens"] > 0
    assert server.stats()["crashes"] == 1
    assert ask(server)[0] == 200


def test_while_it_is_down_it_closes_connections_and_while_it_loads_it_refuses(server: FakeServer) -> None:
    server.change(load_s=3600)
    server.strike("die", restart_s=3600)
    with pytest.raises(BROKEN_OFF):
        ask(server)

    server.change(alive=True)

    assert ask(server)[0] == 503
    server.change(load_s=0)
    assert ask(server)[0] == 200


def is_up(server: Remote) -> bool:
    try:
        return get(server, "/health")[0] == 200
    except BROKEN_OFF:
        return False


def test_a_server_that_loads_slowly_refuses_until_it_is_loaded() -> None:
    with FakeServer(model="tiny", load_s=3600) as server:
        assert [get(server, "/health")[0], get(server, "/v1/models")[0], ask(server)[0]] == [503, 503, 503]
        server.change(load_s=0)
        assert ask(server)[0] == 200


def test_a_crash_by_order_breaks_off_what_is_in_flight_and_needs_no_request(server: FakeServer) -> None:
    server.change(latency_s=60)

    with ThreadPoolExecutor(1) as clients:
        client = clients.submit(ask, server, timeout_s=60)
        until(lambda: server.stats()["in_flight"] == 1)
        server.strike("die", restart_s=0)
        assert isinstance(client.exception(60), BROKEN_OFF)
    server.change(latency_s=0)

    until(lambda: is_up(server))
    assert ask(server)[0] == 200


def test_only_a_fault_that_needs_no_request_strikes_by_order(server: FakeServer) -> None:
    with pytest.raises(HTTPError, match="400"):
        server.strike("cut")

    assert server.stats()["faults"] == {}


def test_a_stalled_server_answers_looks_with_flat_counters_and_goes_on_when_it_is_over(server: FakeServer) -> None:
    server.change(tokens=400, spread=0, seconds_per_token=1.0, time_scale=100)

    with ThreadPoolExecutor(1) as clients:
        client = clients.submit(ask, server, timeout_s=60)
        until(lambda: server.stats()["generated_tokens"] > 1)
        server.strike("stall")
        flat = gauges(server)
        server.change(time_scale=1e6)  # what is not frozen would end at once
        assert get(server, "/health")[0] == 200
        assert gauges(server) == flat
        assert flat["vllm:num_requests_running"] == 1
        assert not client.done()
        server.change(frozen=False)

        assert client.result(60)[0] == 200


def test_a_stall_can_end_by_itself(server: FakeServer) -> None:
    server.change(latency_s=0.1)
    server.fault("stall", for_s=0.2, times=1)

    assert ask(server)[0] == 200


def test_a_ghost_shows_nothing_at_work_and_never_answers_what_it_had(server: FakeServer) -> None:
    server.change(latency_s=60, slots=1)
    server.fault("ghost", contains="boo", times=1)

    with ThreadPoolExecutor(3) as clients:
        forgotten = [clients.submit(ask, server, str(number), timeout_s=60) for number in range(2)]
        until(lambda: server.stats()["waiting"] == 1)
        forgotten.append(clients.submit(ask, server, "boo", timeout_s=60))
        until(lambda: server.stats()["faults"] == {"ghost": 1})
        seen = gauges(server)
        server.change(latency_s=0)
        later = ask(server, "another")[0]
        assert not any(client.done() for client in forgotten)
        server.clear()
        errors = [client.exception(60) for client in forgotten]

    assert seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0
    assert later == 200
    assert all(isinstance(error, BROKEN_OFF) for error in errors)


def test_another_model_after_a_restart(server: FakeServer) -> None:
    server.strike("other_model", restart_s=0)

    until(lambda: is_up(server))
    assert json.loads(get(server, "/v1/models")[2])["data"][0]["id"] == "other"
    assert ask(server)[0] == 404


def test_retry_after_can_be_a_date(server: FakeServer) -> None:
    server.fault("status", status=429, retry_after_date_s=3600)

    when = parsedate_to_datetime(ask(server)[1]["Retry-After"])

    assert 3000 < (when - datetime.now(UTC)).total_seconds() < 3601


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
def test_a_status_is_answered_as_often_as_ordered(server: FakeServer, status: int) -> None:
    server.fault("status", status=status, retry_after="7", times=2)

    first, second, third = (ask(server) for _ in range(3))

    assert [first[0], second[0], third[0]] == [status, status, 200]
    assert first[1]["Retry-After"] == "7"


@pytest.mark.parametrize("kind", ["close", "cut"])
def test_a_connection_breaks_before_or_within_the_body(server: FakeServer, kind: Any) -> None:
    server.fault(kind, times=1)

    with pytest.raises(BROKEN_OFF):
        ask(server)

    assert ask(server)[0] == 200


def test_a_hanging_request_gets_nothing_until_the_fault_is_taken_back(server: FakeServer) -> None:
    server.fault("hang", contains="slow")

    with ThreadPoolExecutor(1) as clients:
        hanging = clients.submit(ask, server, "slow", timeout_s=60)
        until(lambda: server.stats()["rows"].get("slow", {}).get("requests") == 1)
        assert ask(server, "quick")[0] == 200
        assert not hanging.done()
        server.clear()

        assert isinstance(hanging.exception(60), BROKEN_OFF)
    assert ask(server, "slow")[0] == 200


def test_a_prompt_that_kills_the_server_takes_all_the_others_with_it(server: FakeServer) -> None:
    server.change(latency_s=0.5)
    server.fault("die", contains="poison")

    with ThreadPoolExecutor(3) as clients:
        others = [clients.submit(ask, server, str(i)) for i in range(2)]
        until(lambda: server.stats()["in_flight"] == 2)
        with pytest.raises(BROKEN_OFF):
            ask(server, "poison")
        assert all(isinstance(other.exception(20), BROKEN_OFF) for other in others)
    with pytest.raises(BROKEN_OFF):
        get(server, "/health")

    server.change(alive=True, faults=[])
    assert ask(server)[0] == 200


def test_a_loading_server_says_so_until_it_is_ready(server: FakeServer) -> None:
    server.change(ready=False)
    loading = [get(server, "/health")[0], get(server, "/v1/models")[0], ask(server)[0]]
    server.change(ready=True)

    assert loading == [503, 503, 503]
    assert [get(server, "/health")[0], get(server, "/v1/models")[0], ask(server)[0]] == [200, 200, 200]


def test_a_server_can_come_back_with_another_model(server: FakeServer) -> None:
    server.fault("other_model", after=2, times=1)

    statuses = [ask(server)[0] for _ in range(4)]

    assert statuses == [200, 200, 404, 404]
    assert json.loads(get(server, "/v1/models")[2])["data"][0]["id"] == "other"


def test_answers_are_spoiled_one_by_one(server: FakeServer) -> None:
    def spoiled(kind: Any) -> dict[str, Any]:
        server.change(faults=[{"kind": kind}])
        return answered(server, return_token_ids=True)

    sound = answered(server, return_token_ids=True)
    thought = message(sound)["reasoning"]

    assert spoiled("abort")["choices"][0]["finish_reason"] == "abort"
    assert message(spoiled("rename_reasoning"))["thoughts"] == thought
    assert "reasoning" not in message(spoiled("rename_reasoning"))
    assert message(spoiled("no_reasoning")) == {"role": "assistant", "content": message(sound)["content"]}
    assert "usage" not in spoiled("no_usage")
    assert "token_ids" not in spoiled("no_ids")["choices"][0]
    assert len(spoiled("wrong_ids")["choices"][0]["token_ids"]) == sound["usage"]["completion_tokens"] - 1
    for kind, finish_reason in (("cut_in_thought", "length"), ("end_in_thought", "stop")):
        body = spoiled(kind)
        assert body["choices"][0]["finish_reason"] == finish_reason
        assert message(body)["content"] is None
        assert thought.startswith(message(body)["reasoning"])
        assert len(body["choices"][0]["token_ids"]) == body["usage"]["completion_tokens"]
    server.clear()
    assert message(answered(server, return_token_ids=True)) == message(sound)


def test_garbage_comes_with_status_200(server: FakeServer) -> None:
    server.fault("garbage")

    status, _, raw = ask(server)

    assert status == 200
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(raw)


def test_a_share_of_requests_is_hit_and_evenly_spread(server: FakeServer) -> None:
    server.fault("status", share=0.25)

    statuses = [ask(server)[0] for _ in range(12)]

    assert statuses == [200, 200, 200, 500] * 3


def test_the_first_fault_that_fits_is_the_one_that_strikes(server: FakeServer) -> None:
    server.fault("status", status=400, contains="poison")
    server.fault("status", status=503)

    assert ask(server, "poison")[0] == 400
    assert ask(server, "hello")[0] == 503


def test_an_order_it_does_not_know_is_refused_and_changes_nothing(server: FakeServer) -> None:
    with pytest.raises(HTTPError, match="400"):
        server.change(latency=1)
    with pytest.raises(ValidationError):
        server.fault("explode")  # pyright: ignore[reportArgumentType]

    assert ask(server)[0] == 200


# -- how it runs


def test_as_a_process_it_can_be_killed_and_started_again_on_the_same_port() -> None:
    with FakeProcess(model="tiny") as server:
        port = int(server.url.rpartition(":")[2])
        assert ask(server)[0] == 200
        server.kill()
        with pytest.raises(OSError, match="refused"):
            ask(server)

        with FakeProcess(model="tiny", port=port) as restarted:
            assert restarted.url == server.url
            assert ask(restarted)[0] == 200


def test_by_hand_it_prints_its_address_first_and_stops_on_sigterm() -> None:
    args = [sys.executable, "-m", "draftfleet", "fake-server", "--shape", "transformers", "--model", "tiny"]
    with subprocess.Popen(args, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = Remote(json.loads(process.stdout.readline())["urls"][0])
        status = ask(server)[0]
        process.send_signal(signal.SIGTERM)

        assert status == 200
        assert process.wait(20) == 0


def test_several_servers_listen_on_consecutive_ports_each_with_what_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "fake.toml").write_text(
        'servers = 3\nmodel = "tiny"\nslots = 5\n[[faults]]\nkind = "status"\ntimes = 1\n[server.1]\nspeed = 0.5\n'
    )
    port = free_ports(3)
    args = [sys.executable, "-m", "draftfleet", "fake-server", "--port", str(port)]
    args += ["--config", str(tmp_path / "fake.toml"), "--set", "server.2.shape=sglang", "--slots", "7"]

    with subprocess.Popen(args, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        all_ = [Remote(url) for url in json.loads(process.stdout.readline())["urls"]]
        settings = [changed(server) for server in all_]
        statuses = [ask(server)[0] for server in all_ for _ in range(2)]
        process.send_signal(signal.SIGINT)
        code = process.wait(20)

    assert [server.url for server in all_] == [f"http://127.0.0.1:{port + number}" for number in range(3)]
    assert [one["speed"] for one in settings] == [1.0, 0.5, 1.0]
    assert [one["shape"] for one in settings] == ["vllm", "vllm", "sglang"]
    assert [one["slots"] for one in settings] == [7, 7, 7]
    assert statuses == [500, 200] * 3
    assert code == 0


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    for port in range(21_000 + os.getpid() % 5000, 32_000):
        with ExitStack() as stack, suppress(OSError):
            for number in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port
    raise AssertionError("no free ports")


def changed(server: Remote, **settings: Any) -> dict[str, Any]:
    """The answer to a change: all settings."""
    request = urllib.request.Request(server.url + "/fake/faults", json.dumps(settings).encode())
    return json.loads(_open(request)[2])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shape": "llama"}, "shape = 'llama': Input should be 'vllm', 'vllm-0.10', 'sglang'"),
        ({"slot": 3}, "slot = 3: Extra inputs are not permitted. Settings: servers, host, port, shape, model"),
        ({"servers": 0}, "servers = 0: Input should be greater than 0"),
        ({"faults": [{"kind": "explode"}]}, "faults.0.kind = 'explode': Input should be 'hang'"),
        ({"server": {"2": {"speed": 0.5}}}, "server.2: there is no such server; the last of 2 is 1"),
    ],
)
def test_by_hand_it_refuses_what_it_does_not_know(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        command.understand({"servers": 2} | settings)


def test_by_hand_a_port_that_is_taken_and_a_file_that_is_missing_are_told(server: FakeServer, tmp_path: Path) -> None:
    port = int(server.url.rpartition(":")[2])

    with pytest.raises(SettingsError, match=f"--port {port}: cannot listen on 127.0.0.1:{port}: "):
        command.serve({"port": port})
    with pytest.raises(SettingsError, match=r"--config .*no\.toml: .*No such file"):
        command.read({}, config=tmp_path / "no.toml", text=None, assigned=[])


def test_a_process_does_not_outlive_the_one_that_started_it() -> None:
    program = "import os, signal\nfrom draftfleet.testing import FakeProcess\n"
    program += "with FakeProcess() as server:\n    print(server.pid, flush=True)\n    signal.pause()\n"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(20)

    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_in_a_thread_it_leaves_nothing_behind_even_with_requests_in_flight() -> None:
    before = threading.active_count()

    with ThreadPoolExecutor(1) as clients:
        with FakeServer(model="tiny", latency_s=60) as server:
            hanging = clients.submit(ask, server, timeout_s=60)
            until(lambda: server.stats()["in_flight"] == 1)

        assert isinstance(hanging.exception(20), BROKEN_OFF)
    assert threading.active_count() == before
    with pytest.raises(OSError, match="refused"):
        ask(server)


def test_a_port_that_is_taken_is_an_error_at_once(server: FakeServer) -> None:
    port = int(server.url.rpartition(":")[2])

    with pytest.raises(OSError, match="address already in use"), FakeServer(port=port):
        pass
