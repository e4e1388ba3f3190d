"""What the guides for large targets compute, from their settings and from the code that builds drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftfleet.settings import Settings, load
from trainer.algorithms.dflash import default_layers as dflash_layers
from trainer.algorithms.dflash.model import Drafter as DFlashDrafter
from trainer.algorithms.eagle3.model import Drafter as Eagle3Drafter
from trainer.drafter import DrafterConfig
from trainer.targets import default_layers

ROOT = Path(__file__).parents[2]

KIMI = {
    "vocab_size": 163_840, "hidden_size": 7168, "intermediate_size": 18_432, "num_target_layers": 61,
    "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 112,
}  # fmt: skip
QWEN = {
    "vocab_size": 248_320, "hidden_size": 5120, "intermediate_size": 17_408, "num_target_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
"""As their published configurations say. Kimi's attention is MLA: a drafter of ours has heads of width / heads."""


def page(name: str) -> str:
    return " ".join((ROOT / f"docs/guides/{name}.md").read_text().split())


def config(settings: Settings, shape: dict[str, int], **fields: Any) -> DrafterConfig:
    return DrafterConfig(
        algorithm=settings.trainer.algorithm, target="", layers=settings.trainer.layers or [], hidden_act="silu",
        target_hidden_size=shape["hidden_size"], rms_norm_eps=1e-6, max_position_embeddings=262_144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **shape, **fields,
    )  # fmt: skip


def billions(drafter: torch.nn.Module) -> float:
    return sum(weight.numel() for weight in drafter.parameters()) / 1e9


def test_the_kimi_guide_has_the_sizes_of_its_settings() -> None:
    settings, text = load(ROOT / "examples/eagle3-kimi-k2.5.toml"), page("eagle3-kimi")
    shape = config(settings, KIMI, draft_vocab_size=settings.eagle3.draft_vocab_size)
    with torch.device("meta"):
        size = billions(Eagle3Drafter(shape))

    assert settings.trainer.layers == default_layers(61)
    assert f"{size:.2f} billion parameters" in text
    assert f"{size * 16:.0f} GB with gradients and AdamW" in text
    assert f"{(len(shape.layers) + 1) * shape.hidden_size * 2:,} bytes" in text
    assert f"{2 * shape.vocab_size * shape.hidden_size * 2 / 1e9:.1f} GB in bfloat16" in text


def test_the_qwen_guide_has_the_sizes_of_its_settings() -> None:
    settings, text = load(ROOT / "examples/dflash-qwen3.6-27b.toml"), page("dflash-qwen")
    knobs = settings.dflash
    kinds = ["full_attention"] * knobs.num_layers
    shape = config(settings, QWEN, style="qwen3", num_layers=knobs.num_layers, block_size=16, layer_types=kinds)
    with torch.device("meta"):
        size = billions(DFlashDrafter(shape))

    step = settings.trainer.batch_tokens * settings.trainer.accumulation
    state = (len(shape.layers) + 1) * shape.hidden_size * 2
    assert settings.trainer.layers == dflash_layers(64)
    assert f"{size:.1f} billion parameters: {size * 16:.0f} GB with gradients and AdamW" in text
    assert f"{state:,} bytes: {state * 1.64e9 / 1e12:.0f} TB for 1.64 billion tokens" in text
    assert f"{step:,} tokens" in text
    assert settings.trainer.max_steps * step == pytest.approx(3 * 1.64e9, rel=0.02)
    assert f"{settings.trainer.max_steps:,} steps" in text
