"""The ends of a target, read without its layers, against the whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from draftfleet.errors import TargetError
from trainer.targets import Row, weights
from trainer.targets.hf import HfTarget

TINY = Path(__file__).parents[3] / "examples" / "tiny-target"
CPU = torch.device("cpu")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": [1, 3],
    "pad_token_id": None,
}

CONFIGS: dict[str, Any] = {
    "llama, its head its own": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "gemma 2, capped": Gemma2Config(**SMALL, final_logit_softcapping=2.0),
    "gemma 3, a text model inside a larger one": Gemma3Config(
        text_config=SMALL | {"sliding_window": 4},
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
            "image_size": 8, "patch_size": 4,
        },
        mm_tokens_per_image=4,
        image_token_index=63,
    ),
    "gpt 2, other names": GPT2Config(n_embd=32, n_head=2, n_layer=4, vocab_size=64, n_positions=16, eos_token_id=3),
    "qwen 3.5, recurrent layers": Qwen3_5TextConfig(
        **SMALL, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=16, linear_value_head_dim=16
    ),
    "qwen 3, experts": Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt-oss": GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "deepseek 3": DeepseekV3Config(
        **{key: value for key, value in SMALL.items() if key != "head_dim"},
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
}  # fmt: skip


def saved(config: Any, folder: Path, **how: Any) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        weights.find(model.get_decoder(), weights.FINAL_NORMS, "", "norm").weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **how)
    return str(folder)


def assert_ends_of(path: str, dtype: torch.dtype) -> None:
    whole = HfTarget(weights.read(path, dtype=dtype, device_map={"": CPU}), [1, 2], path)

    ends = weights.load(path, dtype, CPU)

    row = Row("row", torch.arange(12) % 60, torch.ones(12).bool())
    last = next(whole.capture([[row]]))[0].last
    assert torch.equal(ends.logits(last), whole.logits(last))
    for ours, theirs in (
        (ends.embedding, whole.embedding), (ends.head, whole.head), (ends.norm_scale, whole.norm_scale)
    ):  # fmt: skip
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert ends.eos_token_ids == whole.eos_token_ids
    assert ends.config.to_dict() == whole.config.to_dict()
    assert ends.dtype == dtype
    assert ends.device == CPU


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_embedding_head_and_norm_equal_the_whole_models_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert_ends_of(saved(CONFIGS[name], tmp_path / "target"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_ends_of_a_real_target_are_equal_in_either_dtype(dtype: torch.dtype) -> None:
    assert_ends_of(str(TINY), dtype)

    ends = weights.load(str(TINY), dtype, CPU)
    assert ends.embedding.data_ptr() == ends.head.data_ptr()
    assert ends.num_layers == ends.config.num_hidden_layers == 8
    assert ends.eos_token_ids == {0, 2}


def test_only_the_files_of_an_index_that_hold_the_ends_are_read(tmp_path: Path) -> None:
    path = saved(CONFIGS["llama, its head its own"], tmp_path / "sharded", max_shard_size="20KB")
    index = json.loads((Path(path) / "model.safetensors.index.json").read_text())["weight_map"]
    ends = {file for name, file in index.items() if ".layers." not in name}
    assert len(set(index.values()) - ends) > 0
    assert_ends_of(path, torch.float32)

    for file in set(index.values()) - ends:  # those of the layers alone, unreadable now
        whole = load_file(Path(path) / file)
        save_file({name: tensor[:0] for name, tensor in whole.items()}, Path(path) / file, metadata={"format": "pt"})

    assert len(weights.load(path, torch.float32, CPU).head) == 64


def test_layers_that_are_quantised_in_an_unknown_way_are_not_in_the_way(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "new"}}))

    ends = weights.load(str(folder), torch.float32, CPU)

    assert torch.equal(ends.head, weights.load(str(TINY), torch.float32, CPU).head)


def test_ends_that_are_missing_are_refused_rather_than_filled_at_random(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "torn")
    kept = load_file(folder / "model.safetensors")
    del kept["model.norm.weight"]
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(TargetError, match=r"lacks 1 weights of Qwen3ForCausalLM, model\.norm\.weight"):
        weights.load(str(folder), torch.float32, CPU)


def test_an_unknown_architecture_and_one_that_scales_its_logits_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "new")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "brand-new"}))
    with pytest.raises(TargetError, match=r"cannot be loaded as a causal language model: .*brand-new"):
        weights.load(str(folder), torch.float32, CPU)

    scaled = saved(GraniteConfig(**SMALL, logits_scaling=8.0), tmp_path / "granite")
    with pytest.raises(TargetError, match=r"does not compute its logits as head\(norm\(last hidden state\)\)"):
        weights.load(scaled, torch.float32, CPU)


@pytest.mark.parametrize("path", ["", "/no/such/folder", "neither"])
def test_a_folder_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(TargetError, match=r"target\.path"):
        weights.load(path, torch.float32, CPU)
