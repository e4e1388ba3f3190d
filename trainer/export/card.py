"""The model card, README.md: what the drafter is, what it was trained on and how, how often it is accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

import draftfleet
from draftfleet import drafters
from draftfleet.acceptance import PARTS
from draftfleet.export_data.card import sources_of
from draftfleet.redaction import redact
from draftfleet.runs import Run
from trainer.drafter import DrafterConfig
from trainer.export.shapes import draft_vocab_size

TEMPLATE = Path(__file__).with_name("card.md.j2")
NAMES = {"eagle3": "EAGLE-3", "dflash": "DFlash"}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "vLLM and speculators"}
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`command` serves the target with the folder, which it names FOLDER."""

    run: Run
    drafter: str
    step: int
    format: str
    config: DrafterConfig
    target: str
    license: str | None
    dtype: str
    num_parameters: int
    command: str


def text(facts: Facts) -> str:
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    evaluation = drafters.read(facts.run, facts.drafter, "evaluation.json") or {}
    bench = drafters.read(facts.run, facts.drafter, "bench.json") or {}
    rendered = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        config=facts.config,
        front=_front(facts),
        algorithm=NAMES.get(facts.config.algorithm, facts.config.algorithm),
        engine=ENGINES[facts.format],
        target=shown(facts.target),
        shape=_shape(facts.config),
        before=[layer + 1 for layer in facts.config.layers],
        evaluation=evaluation,
        acceptance=_acceptance(evaluation),
        is_of_this_step=evaluation.get("checkpoint") == f"step-{facts.step:06d}",
        bench=bench,
        engine_of_bench="vLLM" if bench.get("dialect") == "vllm" else "SGLang",
        progress=drafters.read(facts.run, facts.drafter, "progress.json") or {},
        settings=_settings(facts),
        content={name: _cell(value) for name, value in facts.run.info.content.items()},
        sources=sources_of(facts.run),
        version=draftfleet.__version__,
        date=datetime.now(UTC).date(),
        cell=_cell,
    )
    return redact(rendered)


def _front(facts: Facts) -> str:
    """YAML, of which JSON is a part: so nothing in a value can break out of it."""
    fields: dict[str, Any] = {
        "license": facts.license or "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["draftfleet", "speculative-decoding", "draft-model", facts.config.algorithm, facts.format],
    }
    if is_of_the_hub(facts.target):
        fields["base_model"] = facts.target
    if facts.format == "speculators":
        fields["library_name"] = "speculators"
    return "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())


def is_of_the_hub(target: str) -> bool:
    return target.count("/") == 1 and not target.startswith((".", "/", "~"))


def shown(target: str) -> str:
    """Of a folder its name, not where it stands: a card is for others."""
    return target if is_of_the_hub(target) else PurePath(target).name or "unknown"


def _shape(config: DrafterConfig) -> dict[str, Any]:
    size = draft_vocab_size(config)
    whole = " (all of the target's)" if size == config.vocab_size else f" of {config.vocab_size:,}"
    shape: dict[str, Any] = {
        "decoder layers": config.num_layers,
        "width": config.hidden_size,
        "feed-forward width": config.intermediate_size,
        "heads": f"{config.num_attention_heads} of {config.head_dim}, {config.num_key_value_heads} for keys and values",
        "vocabulary": f"{size:,}{whole}",
        "longest position": f"{config.max_position_embeddings:,}",
        "RoPE": f"`{json.dumps(config.rope_parameters)}`",
    }
    if config.algorithm == "dflash":
        kinds = config.layer_types or ["full_attention"] * config.num_layers
        shape |= {
            "block": f"{config.block_size} tokens, {config.block_size - 1} of them drafted",
            "token of a masked slot": config.mask_token_id,
            "attention": ", ".join(kinds)
            + (f"; window {config.sliding_window:,}" if "sliding_attention" in kinds and config.sliding_window else ""),
            "causal in full attention": config.causal,
        }
    else:
        shape |= {"draft steps in training": config.ttt_steps, "style": config.style}
        shape |= {"flags set": ", ".join(flag for flag in FLAGS if getattr(config, flag)) or "none"}
    return shape


def _acceptance(evaluation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Rows of a table: of all prompts, and of the parts that an evaluation has."""
    rows = [("all", evaluation)] if "acceptance_length" in evaluation else []
    for part, word in PARTS.items():
        rows += [(f"{word}: {name}", one) for name, one in (evaluation.get(part) or {}).items()]
    return rows


def _settings(facts: Facts) -> dict[str, str]:
    """What is pinned with the drafter, but for places of this machine."""
    pinned = drafters.read(facts.run, facts.drafter, "drafter-settings.json") or {}
    return {
        f"{section}.{name}": _cell(value)
        for section, values in pinned.items()
        if section != "target" and isinstance(values, dict)
        for name, value in values.items()
        if name not in HIDDEN and not _is_a_path(value)
    }


HIDDEN = ("device", "metrics_port", "metrics_address", "poll_s", "log_steps", "keep_checkpoints", "checkpoint_steps")


def _is_a_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("/", "~", "."))


def _cell(value: Any) -> str:
    """In a table, on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return " ".join(text.replace("|", "\\|").split())
