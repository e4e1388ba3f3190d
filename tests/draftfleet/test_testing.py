"""The fake server does what it is told: what a test sees of a fault is what a client would see of the real one."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
from pydantic import ValidationError

from draftfleet.testing import FakeProcess, FakeServer, Remote
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


# -- what a sick one does


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
    command = [sys.executable, "-m", "draftfleet", "fake-server", "--shape", "transformers", "--model", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = Remote(json.loads(process.stdout.readline())["urls"][0])
        status = ask(server)[0]
        process.send_signal(signal.SIGTERM)

        assert status == 200
        assert process.wait(20) == 0


def test_by_hand_it_refuses_a_shape_that_it_does_not_know() -> None:
    command = [sys.executable, "-m", "draftfleet", "fake-server", "--shape", "llama"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "shape" in done.stderr
    assert done.stdout == ""


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
