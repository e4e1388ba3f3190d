"""GET /metrics of the imitated servers that have one, under the names of the real."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftfleet.testing.behaviour import Behaviour, Shape
from draftfleet.testing.speculation import Drafts


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


def text(behaviour: Behaviour, readings: Readings, drafts: Drafts) -> str | None:
    """None where the shape has none."""
    names = NAMES.get(behaviour.shape)
    if names is None:
        return None
    labels = LABELS[behaviour.shape].format(model=behaviour.model)
    load = (_metric(name, labels, float(getattr(readings, reading))) for reading, name in names.items())
    return "".join([*load, *_counted(behaviour, labels, drafts)])


def _counted(behaviour: Behaviour, labels: str, drafts: Drafts) -> Iterator[str]:
    """Requests and drafts. vLLM shows its counters of drafts only where it drafts, SGLang shows 0 where it does not."""
    match behaviour.shape:
        case "vllm" | "vllm-0.10":
            yield _metric("vllm:request_success_total", _with(labels, "finished_reason", "stop"), drafts.answered)
            if behaviour.draft_tokens is not None:
                yield _metric("vllm:spec_decode_num_drafts_total", labels, drafts.passes)
                yield _metric("vllm:spec_decode_num_draft_tokens_total", labels, drafts.drafted)
                yield _metric("vllm:spec_decode_num_accepted_tokens_total", labels, drafts.accepted)
                for position, count in enumerate(drafts.per_position):
                    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                    yield _metric(name, _with(labels, "position", str(position)), count)
        case "sglang":
            yield _metric("sglang:num_requests_total", labels, drafts.answered)
            length = 1 + drafts.accepted / drafts.passes if drafts.passes else 0.0
            yield _metric("sglang:spec_accept_length", labels, length)
        case _:
            pass


def _with(labels: str, name: str, value: str) -> str:
    return f'{labels[:-1]},{name}="{value}"}}'


def _metric(name: str, labels: str, value: float) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    return f"# TYPE {name.removesuffix('_total')} {kind}\n{name}{labels} {float(value)}\n"
