"""What is read from /metrics pages: the names of each engine, of several engines behind one address, of none."""

from __future__ import annotations

import pytest

from workers.gauges import Gauges, read

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="m"} 0.0
"""
SGLANG = """sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 4.0
sglang:num_running_reqs{dp_rank="1",tp_rank="2"} 2.0
sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 1.0
sglang:token_usage{dp_rank="0",tp_rank="0"} 0.5
sglang:token_usage{dp_rank="1",tp_rank="2"} 0.75
sglang:realtime_tokens_total{mode="decode"} 400.0
sglang:realtime_tokens_total{mode="prefill_compute"} 50.0
sglang:generation_tokens_total{model_name="m"} 300.0
"""
LLAMACPP = """llamacpp:requests_processing 2
llamacpp:requests_deferred 1
llamacpp:tokens_predicted_total 900
llamacpp:n_decode_total 77
"""


def test_vllm_tells_all_and_its_tokens_are_counted_as_they_are_made() -> None:
    assert read(VLLM) == Gauges(12, 3, 0.25, 7, 1_500_000, tokens_are_live=True, steps=1_501_000)


def test_the_name_that_vllm_had_for_its_cache_before_is_read_too() -> None:
    gauges = read('vllm:gpu_cache_usage_perc{model_name="m"} 0.42\n')

    assert gauges == Gauges(kv=0.42)


def test_sglang_ranks_of_one_engine_count_once_engines_add_up_and_the_fullest_cache_counts() -> None:
    assert read(SGLANG) == Gauges(6, 1, 0.75, None, 400, tokens_are_live=True, steps=450)


def test_tokens_that_are_only_counted_when_an_answer_ends_are_no_sign_of_life() -> None:
    older_sglang = read("sglang:num_running_reqs 3\nsglang:generation_tokens_total 300\n")

    assert older_sglang == Gauges(running=3, generated_tokens=300)
    assert read(LLAMACPP) == Gauges(2, 1, None, None, 900, tokens_are_live=False, steps=77)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html>no</html>",
        "process_cpu_seconds_total 3\n",
        "vllm:num_requests_running{a\n",
        'vllm:num_requests_running{engine="0", =l="x"} 3.0',
    ],
)
def test_a_page_without_gauges_is_none(page: str) -> None:
    assert read(page) is None


def test_a_gauge_that_is_no_number_is_left_out() -> None:
    assert read("vllm:num_requests_running NaN\nvllm:num_requests_waiting 2\n") == Gauges(waiting=2)
