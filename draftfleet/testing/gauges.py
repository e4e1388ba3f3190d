"""GET /metrics of the imitated servers that have one, under the names of the real."""

from __future__ import annotations

from dataclasses import dataclass

from draftfleet.testing.behaviour import Behaviour, Shape


@dataclass(frozen=True, slots=True)
class Readings:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    generated_tokens: int = 0


NAMES: dict[Shape, dict[str, str]] = {
    "vllm": {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_usage": "vllm:kv_cache_usage_perc",
        "preemptions": "vllm:num_preemptions_total",
        "generated_tokens": "vllm:generation_tokens_total",
    },
    "vllm-0.10": {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_usage": "vllm:gpu_cache_usage_perc",
        "preemptions": "vllm:num_preemptions_total",
        "generated_tokens": "vllm:generation_tokens_total",
    },
    "sglang": {
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "kv_usage": "sglang:token_usage",
        "preemptions": "sglang:num_retracted_requests_total",
        "generated_tokens": "sglang:generation_tokens_total",
    },
    "llamacpp": {
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
        "generated_tokens": "llamacpp:tokens_predicted_total",
    },
}
"""By shape, the name of each reading that the real server gives. The others have no /metrics."""

LABELS: dict[Shape, str] = {
    "vllm": '{{engine="0",model_name="{model}"}}',
    "vllm-0.10": '{{engine="0",model_name="{model}"}}',
    "sglang": '{{engine_type="unified",model_name="{model}",pp_rank="0",tp_rank="0"}}',
    "llamacpp": "",
}


def text(behaviour: Behaviour, readings: Readings) -> str | None:
    """None where the shape has none."""
    names = NAMES.get(behaviour.shape)
    if names is None:
        return None
    labels = LABELS[behaviour.shape].format(model=behaviour.model)
    return "".join(_metric(name, labels, float(getattr(readings, reading))) for reading, name in names.items())


def _metric(name: str, labels: str, value: float) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    return f"# TYPE {name.removesuffix('_total')} {kind}\n{name}{labels} {value}\n"
