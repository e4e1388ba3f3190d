"""What is read of a server's page and answers, against pages as vLLM 0.32 and SGLang 0.5.23 write them."""

from __future__ import annotations

import pytest

from workers.bench.counters import Acceptance, Counters, pooled, read

VLLM = """\
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 30.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
"""

SGLANG = """\
sglang:num_requests_total{model_name="m"} 7.0
sglang:spec_accept_length{dp_rank="0",model_name="m",tp_rank="0"} 2.5
"""


def test_vllm_counts_requests_and_drafts_by_position() -> None:
    counters = read(VLLM)

    assert counters.is_drafting
    assert counters == Counters(32, 100, 300, 150, (80, 50, 20))


def test_engines_behind_one_address_are_added_up() -> None:
    other = VLLM.replace('engine="0"', 'engine="1"')

    counters = read("\n".join(sorted((VLLM + other).splitlines(), key=lambda line: line.removeprefix("# TYPE "))))

    assert (counters.requests, counters.drafts, counters.per_position) == (64, 200, (160, 100, 40))


def test_a_window_is_what_the_counters_gained() -> None:
    before, after = Counters(10, 60, 180, 90, (48, 30, 12)), read(VLLM)

    gained = after.since(before)

    assert gained == Acceptance("counters", 40, 120, 60, (32, 20, 8))
    assert gained.length == 2.5
    assert gained.shares == [0.8, 0.5, 0.2]
    assert after.since(Counters(10)) == Acceptance("counters", 100, 300, 150, (80, 50, 20))


def test_sglang_has_a_gauge_alone_and_shows_zero_where_it_does_not_draft() -> None:
    assert read(SGLANG).since(Counters()) == Acceptance("gauge", gauge=2.5)
    assert read(SGLANG).requests == 7
    assert not read(SGLANG.replace("2.5", "0.0")).is_drafting


@pytest.mark.parametrize("page", ["", "<html>", "vllm:num_requests_running 3\n"], ids=["none", "another", "no drafts"])
def test_a_page_without_the_names_tells_nothing(page: str) -> None:
    assert read(page) == Counters()
    assert not read(page).is_drafting
    assert read(page).since(Counters()) is None


def test_parts_are_pooled_by_their_drafts() -> None:
    parts = [Acceptance("counters", 10, 30, 20, (10, 10)), Acceptance("counters", 30, 90, 30, (20, 10))]

    assert pooled(parts) == Acceptance("counters", 40, 120, 50, (30, 20))
    assert pooled([Acceptance("gauge", gauge=2.0), Acceptance("gauge", gauge=3.0)]) == Acceptance("gauge", gauge=2.5)
    assert pooled([]) is None
