"""Answers that a fake server streams, and the drafts that it counts."""

from __future__ import annotations

import json
from http.client import IncompleteRead
from typing import Any
from urllib.request import Request, urlopen

import pytest

from draftfleet.testing import FakeServer
from draftfleet.testing.speculation import Drafts

QUESTION = [{"role": "user", "content": "Why?"}]
ASKED = {"model": "target", "messages": QUESTION, "stream_options": {"include_usage": True}, "return_token_ids": True}


def post(server: FakeServer, path: str, body: dict[str, Any]) -> bytes:
    with urlopen(Request(server.url + path, json.dumps(body).encode()), timeout=30) as response:
        return response.read()


def streamed(server: FakeServer, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    lines = post(server, path, {**body, "stream": True}).decode().strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_streamed_answer_is_that_which_is_not_streamed() -> None:
    with FakeServer(seconds_per_token=0.02) as server:
        whole = json.loads(post(server, "/v1/chat/completions", ASKED))
        *parts, end, usage = streamed(server, **ASKED)

    choice = whole["choices"][0]
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert len(parts) > 1
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == choice["token_ids"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == choice["message"][name]
    assert end["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_sglang_s_own_stream_has_the_ids_so_far_and_what_became_of_the_drafts() -> None:
    with FakeServer(shape="sglang", seconds_per_token=0.002, draft_tokens=3) as server:
        body = {"input_ids": [16, 17], "sampling_params": {"max_new_tokens": 20}}
        *parts, end = streamed(server, "/generate", **body)

    assert [len(part["output_ids"]) for part in parts] == [part["meta_info"]["completion_tokens"] for part in parts]
    meta = end["meta_info"]
    assert meta["finish_reason"] == {"type": "length"}
    assert meta["completion_tokens"] == 20 == len(end["output_ids"])
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    assert 19 <= meta["spec_verify_ct"] + meta["spec_num_correct_drafts"] < 19 + 3


@pytest.mark.parametrize("kind", ["cut", "die"])
def test_a_stream_breaks_off_where_a_fault_says_so(kind: str) -> None:
    with FakeServer() as server:
        server.fault(kind)

        with pytest.raises((OSError, IncompleteRead)):
            post(server, "/v1/chat/completions", {**ASKED, "stream": True})


def test_shares_of_kept_tokens_come_out_as_they_are_set() -> None:
    drafts = Drafts()
    verified = [drafts.answer(400, draft_tokens=3, keep=0.8) for _ in range(10)]

    assert [count / drafts.passes for count in drafts.per_position] == pytest.approx([0.8, 0.64, 0.512], abs=0.002)
    assert drafts.drafted == 3 * drafts.passes == 3 * sum(one.passes for one in verified if one)
    assert drafts.accepted == sum(drafts.per_position) == sum(one.correct for one in verified if one)
    assert drafts.answered == 10


def test_a_server_without_a_drafter_shows_no_drafts_and_counts_its_requests() -> None:
    with FakeServer() as plain, FakeServer(shape="sglang") as other:
        post(plain, "/v1/chat/completions", ASKED)
        post(other, "/v1/chat/completions", ASKED)
        page, gauge = (urlopen(f"{server.url}/metrics", timeout=30).read().decode() for server in (plain, other))

    assert 'vllm:request_success_total{engine="0",model_name="target",finished_reason="stop"} 1.0' in page
    assert "spec_decode" not in page
    assert "sglang:num_requests_total" in gauge
    assert 'sglang:spec_accept_length{engine_type="unified",model_name="target",pp_rank="0",tp_rank="0"} 0.0' in gauge


def test_counters_of_a_server_that_came_back_begin_at_zero() -> None:
    with FakeServer(draft_tokens=3) as server:
        post(server, "/v1/chat/completions", ASKED)
        server.change(alive=False)
        server.change(alive=True)
        page = urlopen(f"{server.url}/metrics", timeout=30).read().decode()

    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 0.0' in page
