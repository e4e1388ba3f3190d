"""SGLang's rules, each from its source (0.5.23), since it does not run on a CPU. One test for each."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from draftfleet.errors import DrafterError
from draftfleet.settings import Settings
from trainer.export import check, export
from trainer.export.check import refusals
from trainer.export.folder import Verifier
from trainer.export.formats import format_named

QWEN = Verifier("Qwen/Qwen3-8B", ["Qwen3ForCausalLM"])
KIMI = Verifier("moonshotai/Kimi-K2.5", ["KimiK25ForConditionalGeneration"])


@pytest.fixture
def refused(settings: Settings, put: Any, make: Any) -> Any:
    """What an export for SGLang says of a drafter."""

    def ask(algorithm: str = "eagle3", **changes: Any) -> str:
        put(make(algorithm, **changes))
        with pytest.raises(DrafterError) as error:
            export(settings, ["sglang"])
        return str(error.value)

    return ask


@pytest.fixture
def written(settings: Settings, put: Any, make: Any, look: Any) -> Any:
    def ask(algorithm: str = "eagle3", **changes: Any) -> Any:
        put(make(algorithm, **changes))
        return look(export(settings, ["sglang"])["sglang"])

    return ask


# -- models/llama_eagle3.py


def test_the_residual_is_never_the_normed_state(refused: Any) -> None:
    assert "norm_before_residual is true, and the engine knows no such flag" in refused(norm_before_residual=True)


def test_heads_are_never_normed(refused: Any) -> None:
    assert "style is qwen3, and the engine has no norms of heads" in refused(style="qwen3")


def test_fc_is_skipped_where_the_states_are_as_wide_as_the_embedding(refused: Any) -> None:
    assert "the engine skips fc" in refused(layers=[3])


def test_ids_are_read_from_eagle_config_alone_as_a_ids(written: Any) -> None:
    folder = written(layers=[0, 2, 5])

    assert folder.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    folder.edit(lambda c: c.update(eagle_config={"use_aux_hidden_state": True}))
    with pytest.raises(DrafterError, match="eagle_aux_hidden_state_layer_ids is missing"):
        check(folder.path, "sglang")


def test_the_number_of_layers_is_taken_from_num_aux_hidden_states_first(written: Any) -> None:
    folder = written(layers=[1, 4])

    assert folder.config["num_aux_hidden_states"] == 2
    folder.edit(lambda c: c.update(num_aux_hidden_states=3))
    with pytest.raises(DrafterError, match="num_aux_hidden_states is 3, it must be 2"):
        check(folder.path, "sglang")


def test_an_older_flag_turns_on_norms_of_layers(written: Any) -> None:
    folder = written()
    folder.edit(lambda c: c.update(use_aux_norm=True))

    with pytest.raises(DrafterError, match="use_aux_norm = true may not be there"):
        check(folder.path, "sglang")


def test_a_norm_before_fc_is_read_from_eagle_config_before_the_top(written: Any) -> None:
    folder = written(norm_before_fc=True)
    folder.edit(lambda c: c["eagle_config"].update(norm_before_fc=True))

    with pytest.raises(DrafterError, match=r"eagle_config\.norm_before_fc"):
        check(folder.path, "sglang")


def test_fc_has_a_bias_only_if_the_configuration_has_one(written: Any) -> None:
    folder = written()

    assert folder.config["bias"] is False
    folder.edit(lambda c: c.update(bias=True))
    with pytest.raises(DrafterError, match="bias is true, it must be false"):
        check(folder.path, "sglang")


def test_a_draft_vocabulary_of_null_would_take_the_head_of_the_target(written: Any) -> None:
    folder = written()
    folder.edit(lambda c: c.update(draft_vocab_size=None))

    with pytest.raises(DrafterError, match="draft_vocab_size is null, it must be 128"):
        check(folder.path, "sglang")


def test_tied_embeddings_would_take_the_embedding_for_the_head(written: Any) -> None:
    folder = written()
    folder.edit(lambda c: c.update(tie_word_embeddings=True))

    with pytest.raises(DrafterError, match="tie_word_embeddings is true, it must be false"):
        check(folder.path, "sglang")


def test_a_missing_tensor_would_stay_random_without_a_word(written: Any) -> None:
    folder = written()
    folder.edit_tensors(lambda t: t.pop("midlayer.hidden_norm.weight"))

    with pytest.raises(DrafterError, match=r"midlayer\.hidden_norm\.weight is missing"):
        check(folder.path, "sglang")


def test_an_unknown_tensor_would_be_skipped_without_a_word(written: Any) -> None:
    folder = written()
    folder.edit_tensors(lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(32)}))

    with pytest.raises(DrafterError, match=r"midlayer\.self_attn\.q_norm\.weight may not be there"):
        check(folder.path, "sglang")


def test_a_draft_id_becomes_a_target_id_by_adding_d2t(written: Any, make: Any) -> None:
    folder = written(draft_vocab_size=48)

    tensors = folder.tensors
    ids = tensors["d2t"] + torch.arange(48)  # what the engine computes
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()


def test_positions_of_images_would_turn_on_another_rope(written: Any) -> None:
    folder = written()
    folder.edit(lambda c: c["rope_parameters"].update(mrope_section=[8, 4, 4]))

    with pytest.raises(DrafterError, match=r"rope_parameters is .*mrope_section"):
        check(folder.path, "sglang", make_plain(folder.config))


def make_plain(config: dict[str, Any]) -> Any:
    """The drafter that was exported."""
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "mrope_section"}
    return format_named("sglang").read({**config, "rope_parameters": rope}, QWEN)


# -- models/llama.py, models/*.py


def test_an_embedding_is_shared_only_with_a_target_of_the_same_width(make: Any) -> None:
    drafter = make(target_hidden_size=128)

    assert any(
        "hidden_size is 64, it must be target_hidden_size" in one for one in refusals(drafter.config, "sglang", QWEN)
    )


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_what_the_last_layer_puts_out_is_not_captured(refused: Any, algorithm: str) -> None:
    said = refused(algorithm, layers=[1, 3, 7])

    assert "[1, 3, 7], the last that the engine hands out of this target is 6" in said


# -- models/deepseek_v2.py


@pytest.mark.parametrize(("layers", "ids"), [([1, 29, 57], [1, 29, 57]), ([2, 29, 57], [3, 30, 58])])
def test_a_deepseek_target_adds_1_only_where_the_first_id_is_1(make: Any, layers: list[int], ids: list[int]) -> None:
    sglang = format_named("sglang")
    drafter = make(layers=layers, num_target_layers=61).config

    config = sglang.config(drafter, "bfloat16", KIMI)

    written = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert written == ids
    captured = [one + 1 for one in written] if written[0] == 1 else written  # as the engine does
    assert captured == [layer + 1 for layer in layers]
    assert sglang.read(config, KIMI).layers == layers
    assert sglang.config(drafter, "bfloat16", QWEN)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == layers


def test_a_deepseek_target_cannot_be_asked_for_layer_0_first(make: Any) -> None:
    drafter = make(layers=[0, 29, 57], num_target_layers=61).config

    assert any("cannot be asked for layer 0 first" in one for one in refusals(drafter, "sglang", KIMI))
    assert refusals(drafter, "sglang", QWEN) == []


def test_the_architecture_of_the_target_stays_with_the_folder(written: Any) -> None:
    folder = written(layers=[3, 5, 6])
    manifest = json.loads((folder.path / "export.json").read_text())
    assert manifest["target_architectures"] == ["Qwen3ForCausalLM"]

    (folder.path / "export.json").write_text(json.dumps(manifest | {"target_architectures": KIMI.architectures}))

    check(folder.path, "sglang")  # the same ids, of other layers
    with pytest.raises(DrafterError, match=r"is \[3, 5, 6\], it must be \[4, 6, 7\]"):
        check(folder.path, "sglang", format_named("sglang").read(folder.config, QWEN))


# -- models/dflash.py, speculative/dflash_utils.py


def test_fc_of_dflash_reads_as_many_layers_as_are_named(written: Any) -> None:
    folder = written("dflash")
    folder.edit(lambda c: c["dflash_config"].update(target_layer_ids=[1, 5]))

    with pytest.raises(DrafterError, match=r"fc\.weight has shape \(64, 192\), it must be \(64, 128\)"):
        check(folder.path, "sglang")


def test_layers_of_dflash_are_named_as_a_ids(written: Any) -> None:
    assert written("dflash").config["dflash_config"]["target_layer_ids"] == [1, 3, 5]


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention"] * 3])
def test_each_layer_of_dflash_has_a_kind(refused: Any, kinds: list[str]) -> None:
    assert f"layer_types has {len(kinds)} entries, there must be one for each of 2" in refused(
        "dflash", layer_types=kinds
    )


def test_kinds_of_layers_are_full_or_sliding_attention(refused: Any) -> None:
    assert "layer_types has linear_attention" in refused("dflash", layer_types=["full_attention", "linear_attention"])


def test_a_sliding_layer_needs_a_window(refused: Any) -> None:
    assert "sliding_window is None" in refused("dflash", layer_types=["full_attention", "sliding_attention"])


def test_causality_is_read_from_is_causal_else_from_the_kind_of_layer(written: Any) -> None:
    kinds = ["sliding_attention", "full_attention"]

    assert "is_causal" not in written("dflash", layer_types=kinds, sliding_window=32).config
    assert written("dflash", layer_types=kinds, sliding_window=32, causal=True).config["is_causal"] is True


@pytest.mark.parametrize("mask", [-1, 128])
def test_the_mask_is_a_token_of_the_target(refused: Any, mask: int) -> None:
    assert f"mask_token_id is {mask}, it must be a token of the target: 0 to 127" in refused(
        "dflash", mask_token_id=mask
    )


def test_the_mask_is_an_integer(written: Any, make: Any) -> None:
    folder = written("dflash")
    folder.edit(lambda c: c["dflash_config"].update(mask_token_id=7.5))

    with pytest.raises(DrafterError, match=r"mask_token_id is 7\.5, it must be 7"):
        check(folder.path, "sglang", make("dflash").config)


def test_another_name_of_a_mask_may_not_contradict_its_id(written: Any) -> None:
    folder = written("dflash")
    folder.edit(lambda c: c.update(mask_token="<|MASK|>"))

    with pytest.raises(DrafterError, match=r"mask_token = .* may not be there"):
        check(folder.path, "sglang")


def test_the_activation_is_silu(refused: Any) -> None:
    assert "hidden_act is gelu, the engine has only silu" in refused("dflash", hidden_act="gelu")


def test_dflash_has_the_head_and_the_vocabulary_of_its_target(refused: Any) -> None:
    assert "draft_vocab_size is 48: DFlash drafts with the head of its target" in refused("dflash", draft_vocab_size=48)


def test_a_head_of_dflash_would_be_skipped_without_a_word(written: Any) -> None:
    folder = written("dflash")
    folder.edit_tensors(lambda t: t.update({"lm_head.weight": torch.zeros(128, 64)}))

    with pytest.raises(DrafterError, match=r"lm_head\.weight may not be there"):
        check(folder.path, "sglang")


def test_the_size_of_a_block_is_taken_from_the_table_first_and_is_the_same_at_the_top(written: Any) -> None:
    folder = written("dflash")
    folder.edit(lambda c: c.update(block_size=16))

    with pytest.raises(DrafterError, match="block_size is 16, it must be 8"):
        check(folder.path, "sglang")


@pytest.mark.parametrize(
    ("name", "value"),
    [("conv_kernel_size", 2), ("selector_rank", 256), ("projector_type", "domino"), ("attention_value_scale", 0.5)],
)
def test_parts_of_later_variants_are_not_asked_for(written: Any, name: str, value: Any) -> None:
    folder = written("dflash")
    folder.edit(lambda c: c["dflash_config"].update({name: value}))

    with pytest.raises(DrafterError, match=name):
        check(folder.path, "sglang")
