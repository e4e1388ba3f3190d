"""Captured states against Hugging Face's own, and what a target refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MptConfig,
    MptForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from draftfleet.errors import SettingsError, TargetError
from draftfleet.settings import load
from trainer import targets
from trainer.targets import Row, default_layers
from trainer.targets.hf import HfTarget

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return targets.load(load(flags={"target.path": TINY}), [2, 3, 6], CPU)


def rows(*lengths: int, vocab_size: int = 2048) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [
        Row(f"row-{length}", torch.randint(0, vocab_size, (length,), generator=generator), torch.ones(length).bool())
        for length in lengths
    ]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_padded_rows_together_equal_one_row_at_a_time_in_hugging_face(tiny: HfTarget) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    batches = [rows(5, 70, 33, 1), rows(12, 40)]

    captured = list(tiny.capture(batches))

    assert [[one.row.key for one in batch] for batch in captured] == [[row.key for row in batch] for batch in batches]
    for one in [one for batch in captured for one in batch]:
        with torch.no_grad():
            theirs = model(one.row.ids[None], output_hidden_states=True)
        hidden = [theirs.hidden_states[layer + 1][0] for layer in (2, 3, 6)]
        assert_close(one.hidden, torch.cat(hidden, -1))
        with torch.no_grad():
            assert_close(model.model.norm(one.last), theirs.hidden_states[-1][0])
            last = model.model.layers[7](theirs.hidden_states[7], **layer_inputs(model, one.row.ids))
            assert_close(one.last, last[0])
        assert_close(tiny.logits(one.last), theirs.logits[0])


def layer_inputs(model: Any, ids: Tensor) -> dict[str, Any]:
    positions = torch.arange(len(ids))[None]
    embeddings = model.model.rotary_emb(torch.zeros(1), positions)
    mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf).triu(1)
    return {"attention_mask": mask, "position_embeddings": embeddings}


def test_a_decoded_step_gives_the_states_of_the_whole_sequence(tiny: HfTarget) -> None:
    ids = rows(30)[0].ids[None]
    hidden, last = tiny.forward(ids)

    cache = tiny.new_cache()
    tiny.forward(ids[:, :20], cache)
    tiny.forward(ids[:, :7], cache)  # a rejected draft
    cache.crop(-7)
    stepped, stepped_last = tiny.forward(ids[:, 20:], cache)

    assert_close(stepped, hidden[:, 20:])
    assert_close(stepped_last, last[:, 20:])


def test_states_carry_no_gradient_and_the_target_has_none(tiny: HfTarget) -> None:
    captured = next(tiny.capture([rows(6)]))[0]

    assert not captured.hidden.requires_grad
    assert not tiny.embedding.requires_grad
    assert not tiny.logits(captured.last).requires_grad


def test_bfloat16_is_the_targets_dtype_when_the_settings_say_so() -> None:
    target = targets.load(load(flags={"target.path": TINY, "trainer.dtype": "bfloat16"}), None, CPU)

    captured = next(target.capture([rows(6)]))[0]

    assert captured.hidden.dtype == target.embedding.dtype == torch.bfloat16
    assert target.logits(captured.last).dtype == torch.float32


def test_layers_are_the_second_the_middle_and_the_fourth_last_unless_named(tiny: HfTarget) -> None:
    target = targets.load(load(flags={"target.path": TINY}), None, CPU)

    assert target.layers == default_layers(8) == [1, 3, 4]
    assert tiny.layers == [2, 3, 6]
    assert default_layers(61) == [1, 29, 57]


def test_a_text_model_inside_a_larger_one_is_found() -> None:
    torch.manual_seed(0)
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 4,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 8,
        "patch_size": 4,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63)
    model = Gemma3ForConditionalGeneration(config).eval()

    target = HfTarget(model, [1, 2, 5], "nested")

    one = next(target.capture([rows(9, 12, vocab_size=60)]))[0]
    with torch.no_grad():
        theirs = model(one.row.ids[None], output_hidden_states=True)
    assert target.config.hidden_size == 32
    assert_close(one.hidden[:, :32], theirs.hidden_states[2][0])
    assert_close(target.logits(one.last), theirs.logits[0])


def test_capped_logits_and_a_norm_that_stores_its_scale_less_one_are_understood() -> None:
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        final_logit_softcapping=2.0,
    )
    model = Gemma2ForCausalLM(config).eval()

    model.model.norm.weight.data.fill_(0.25)  # this family stores what the scale has above one

    target = HfTarget(model, [0, 1, 2], "capped")

    assert target.norm_scale.tolist() == pytest.approx([1.25] * 16)
    one = next(target.capture([rows(9, vocab_size=32)]))[0]
    with torch.no_grad():
        assert_close(target.logits(one.last), model(one.row.ids[None]).logits[0])
    assert 1.5 < target.logits(one.last).abs().max() <= 2


def test_a_model_that_scales_its_logits_in_a_way_of_its_own_is_refused() -> None:
    config = GraniteConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=8.0,
    )
    model = GraniteForCausalLM(config).eval()

    with pytest.raises(TargetError, match=r"does not compute its logits as head\(norm\(last hidden state\)\)"):
        HfTarget(model, [0, 1, 2], "scaled")


def test_a_model_without_the_parts_that_are_listened_to_is_refused() -> None:
    model = MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=6, vocab_size=32)).eval()

    with pytest.raises(TargetError, match=r"no final norm found in MptModel"):
        HfTarget(model, [0, 1, 2], "mpt")


def test_other_names_of_layers_and_norm_are_known() -> None:
    config = GPT2Config(
        n_embd=16, n_head=2, n_layer=3, vocab_size=32, n_positions=16, bos_token_id=None, eos_token_id=3
    )
    model = GPT2LMHeadModel(config).eval()

    target = HfTarget(model, [0, 2], "gpt2")

    one = next(target.capture([rows(4, 9, vocab_size=32)]))[0]
    with torch.no_grad():
        theirs = model(one.row.ids[None], output_hidden_states=True)
    assert_close(one.hidden[:, :16], theirs.hidden_states[1][0])
    assert_close(target.logits(one.last), theirs.logits[0])
    assert target.eos_token_ids == {3}


@pytest.mark.parametrize("layers", [[1, 3, 8], [-1, 3, 4], [3, 1, 4], [1, 1, 4], []])
def test_layers_that_are_not_there_or_not_increasing_are_refused_with_the_range(layers: list[int]) -> None:
    with pytest.raises(TargetError, match=r"trainer\.layers = .* layers 0 to 7"):
        targets.load(load(flags={"target.path": TINY}), layers, CPU)


def test_token_ids_outside_the_vocabulary_name_the_sample_and_the_size(tiny: HfTarget) -> None:
    bad = Row("abc-0-0", torch.tensor([5, 2048]), torch.tensor([False, True]))

    with pytest.raises(TargetError, match=r"abc-0-0 has token ids from 5 to 2048.*vocabulary of 2048"):
        next(tiny.capture([[bad]]))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nor-this", "neither"])
def test_a_folder_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(TargetError, match=rf"target\.path = {path}: there is no such folder"):
        targets.load(load(flags={"target.path": path}), None, CPU)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"cannot be loaded as a causal language model"):
        targets.load(load(flags={"target.path": str(tmp_path)}), None, CPU)


def test_a_folder_that_lacks_weights_is_refused_rather_than_filled_at_random(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "torn")
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.3.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(TargetError, match=r"lacks 11 weights of Qwen3ForCausalLM, model\.layers\.3\."):
        targets.load(load(flags={"target.path": str(folder)}), None, CPU)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"intermediate_size": 256}, r"\w+"),
        ({"model_type": "brand-new"}, r".*brand-new"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"\w+"),
    ],
    ids=["weights of another shape", "an architecture nobody knows", "a package that is missing"],
)
def test_a_folder_that_transformers_cannot_load_is_named_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(TINY, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))

    with pytest.raises(TargetError, match=rf"other cannot be loaded as a causal language model: {said}"):
        targets.load(load(flags={"target.path": str(folder)}), None, CPU)


def test_torn_weights_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "torn")
    (folder / "model.safetensors").write_bytes(b"torn")

    with pytest.raises(TargetError, match=r"torn cannot be loaded as a causal language model: \w+"):
        targets.load(load(flags={"target.path": str(folder)}), None, CPU)


def test_a_target_with_recurrent_layers_is_captured_but_not_decoded_with_a_draft() -> None:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    target = HfTarget(Qwen3_5ForCausalLM(config).eval(), None, "hybrid")
    long, short = rows(20, 9, vocab_size=64)

    together = next(target.capture([[long, short]]))

    alone = next(target.capture([[short]]))[0]
    assert_close(together[1].hidden, alone.hidden)
    assert_close(together[1].last, alone.last)
    with pytest.raises(TargetError, match=r"hybrid has linear_attention layers.*cannot be taken back"):
        target.new_cache()


def test_a_target_that_is_spread_by_accelerate_gives_the_same_states(tiny: HfTarget) -> None:
    spread = targets.load(load(flags={"target.path": TINY, "trainer.device_map": "auto"}), [2, 3, 6], CPU)

    [one], [other] = (next(iter(target.capture([rows(20)]))) for target in (spread, tiny))

    assert torch.equal(one.hidden, other.hidden)
    assert torch.equal(spread.logits(one.last), tiny.logits(other.last))


def test_a_target_that_is_larger_than_the_memory_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = (Path(TINY) / "model.safetensors").stat().st_size  # in bfloat16
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1.5 * stored))

    with pytest.raises(TargetError, match=r"takes \S+ GB in torch.float32, and this machine has .* bench --with URL"):
        targets.load(load(flags={"target.path": TINY}), [2], CPU)

    assert targets.load(load(flags={"target.path": TINY, "trainer.dtype": "bfloat16"}), [2], CPU).layers == [2]


def test_a_target_that_is_spread_is_one_processs() -> None:
    flags = {"target.path": TINY, "trainer.device_map": "auto", "trainer.processes": 2, "trainer.accumulation": 2}
    with pytest.raises(
        SettingsError, match=r"trainer\.device_map = auto .* trainer\.processes = 2 would each load one"
    ):
        targets.load(load(flags=flags), [2, 3, 6], CPU)


def test_no_target_and_an_unknown_kind_of_target_say_what_to_set() -> None:
    with pytest.raises(TargetError, match=r"target\.path is not set"):
        targets.load(load(), None, CPU)
    with pytest.raises(SettingsError, match=r"trainer\.target = 'hff': Input should be 'hf'"):
        load(flags={"trainer.target": "hff"})
