"""The checker refuses folders that an engine would load and serve wrongly, and says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftfleet.errors import DrafterError
from draftfleet.settings import Settings
from trainer.export import FORMATS, check, export

H, V, Q = 64, 128, 4 * 32

Edit = Callable[[dict[str, Any]], object]


def decoder(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("transformer_layer_config", config)


CONFIG_DAMAGE: dict[str, tuple[Edit, str]] = {
    "a flag left out": (lambda c: c.pop("norm_before_residual"), "norm_before_residual is missing, it must be false"),
    "a flag turned": (lambda c: c.update(norm_output=True), "norm_output is true, it must be false"),
    "a flag that is a number": (lambda c: c.update(norm_output=0), "norm_output is 0, it must be false"),
    "a norm per layer": (lambda c: c.update(fc_norm=True), "fc_norm is true, it must be false"),
    "tied embeddings": (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "another architecture": (lambda c: c.update(architectures=["LlamaForCausalLM"]), "architectures is"),
    "two layers": (lambda c: decoder(c).update(num_hidden_layers=2), "num_hidden_layers is 2, it must be 1"),
    "no vocabulary": (lambda c: decoder(c).pop("vocab_size"), "vocab_size is missing"),
    "a cut vocabulary": (lambda c: c.update(draft_vocab_size=32), "draft_vocab_size is 32, it must be 128"),
    "the old rope only": (lambda c: decoder(c).pop("rope_parameters"), "rope_parameters is missing"),
    "two ropes": (lambda c: decoder(c).update(rope_theta=5.0), r"rope_theta is 5\.0, it must be 10000\.0"),
    "no rope theta": (lambda c: decoder(c)["rope_parameters"].pop("rope_theta"), "rope_parameters is "),
    "a shorter context": (lambda c: decoder(c).update(max_position_embeddings=64), "max_position_embeddings is 64"),
    "no type": (lambda c: c.pop("dtype"), "dtype is missing"),
    "two types": (lambda c: c.update(torch_dtype="float16"), 'torch_dtype is "float16", it must be "float32"'),
    "a width of its own": (lambda c: decoder(c).update(hidden_size=32), "hidden_size is 32, it must be 64"),
    "fewer layers seen": (
        lambda c: decoder(c).update(num_aux_hidden_states=2),
        "num_aux_hidden_states is 2, it must be 3",
    ),
    "scaled logits": (lambda c: c.update(logit_scale=0.5), r"logit_scale = 0\.5 may not be there"),
    "quantized": (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "quantization_config = "),
}

LAYER_DAMAGE: dict[str, tuple[str, Edit, str]] = {
    "vllm without ids": (
        "vllm",
        lambda c: c.pop("eagle_aux_hidden_state_layer_ids"),
        "eagle_aux_hidden_state_layer_ids is missing",
    ),
    "vllm with A ids": (
        "vllm",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 2, 5]),
        r"eagle_aux_hidden_state_layer_ids is \[0, 2, 5\], it must be \[1, 3, 6\]",
    ),
    "vllm with nested ids": (
        "vllm",
        lambda c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}),
        "eagle_config = .* may not be there",
    ),
    "vllm with ids of the other algorithm": (
        "vllm",
        lambda c: c.update(dflash_config={"target_layer_ids": [0, 2, 5]}),
        "dflash_config = .* may not be there",
    ),
    "sglang without ids": ("sglang", lambda c: c.pop("eagle_config"), "eagle_config is missing"),
    "sglang with an empty table": (
        "sglang",
        lambda c: c.update(eagle_config={}),
        "eagle_aux_hidden_state_layer_ids is missing",
    ),
    "sglang with B ids": (
        "sglang",
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 6]),
        r"is \[1, 3, 6\], it must be \[0, 2, 5\]",
    ),
    "sglang without aux states": (
        "sglang",
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state is false",
    ),
    "sglang with a norm hidden in its table": (
        "sglang",
        lambda c: c["eagle_config"].update(norm_before_fc=True),
        r"eagle_config\.norm_before_fc = true may not be there",
    ),
    "sglang with ids of vllm": (
        "sglang",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 6]),
        "eagle_aux_hidden_state_layer_ids = .* may not be there",
    ),
    "speculators without ids": (
        "speculators",
        lambda c: c.pop("eagle_aux_hidden_state_layer_ids"),
        "eagle_aux_hidden_state_layer_ids is missing",
    ),
    "speculators with A ids": (
        "speculators",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 2, 5]),
        r"is \[0, 2, 5\], it must be \[1, 3, 6\]",
    ),
    "speculators without a target": (
        "speculators",
        lambda c: c["speculators_config"].pop("verifier"),
        "speculators_config is",
    ),
}

DFLASH_DAMAGE: dict[str, tuple[Edit, str]] = {
    "B ids": (
        lambda c: c["dflash_config"].update(target_layer_ids=[2, 4, 6]),
        r"dflash_config\.target_layer_ids is \[2, 4, 6\], it must be \[1, 3, 5\]",
    ),
    "a second list": (lambda c: c.update(target_layer_ids=[1, 3, 5]), "target_layer_ids = .* may not be there"),
    "ids of EAGLE-3": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 6]),
        "eagle_aux_hidden_state_layer_ids = .* may not be there",
    ),
    "no mask in the table": (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
    "two masks": (lambda c: c.update(mask_token_id=8), "mask_token_id is 8, it must be 7"),
    "two blocks": (lambda c: c["dflash_config"].update(block_size=16), "dflash_config.block_size is 16, it must be 8"),
    "another causality": (lambda c: c.update(is_causal=True), "is_causal is true, it must be false"),
    "causality by the table": (lambda c: c["dflash_config"].update(causal=True), "causal is true, it must be false"),
    "slots from the anchor": (
        lambda c: c["dflash_config"].update(sample_from_anchor=True),
        "sample_from_anchor is true, it must be false",
    ),
    "convolutions of DFlash2": (
        lambda c: c["dflash_config"].update(conv_kernel_size=2),
        r"dflash_config\.conv_kernel_size = 2 may not be there",
    ),
    "layers of another kind": (lambda c: c.update(layer_types=["sliding_attention"] * 2), "layer_types is"),
    "another target": (lambda c: c.update(num_target_layers=36), "num_target_layers is 36, it must be 8"),
}

TENSOR_DAMAGE: dict[str, tuple[Edit, str]] = {
    "missing": (lambda t: t.pop("norm.weight"), r"norm\.weight is missing"),
    "extra": (lambda t: t.update({"d2t": torch.zeros(V)}), "d2t may not be there"),
    "nan": (lambda t: t["fc.weight"].view(-1)[5:7].fill_(float("nan")), r"fc\.weight has 2 values that are not finite"),
    "inf": (lambda t: t["fc.weight"].view(-1)[:1].fill_(float("inf")), r"fc\.weight has 1 values"),
    "shape": (lambda t: t.update({"norm.weight": torch.zeros(2 * H)}), r"norm\.weight has shape \(128,\), it must be"),
    "type": (
        lambda t: t.update({"norm.weight": t["norm.weight"].half()}),
        r"norm\.weight is float16, config\.json says float32",
    ),
}

VOCABULARY_DAMAGE: dict[str, tuple[Edit, str]] = {
    "no d2t": (lambda t: t.pop("d2t"), "d2t is missing"),
    "no t2d": (lambda t: t.pop("t2d"), "t2d is missing"),
    "ids for offsets": (
        lambda t: t["d2t"].add_(torch.arange(48)),
        "d2t leads outside the vocabulary of 128: .*offsets",
    ),
    "out of order": (lambda t: t["d2t"][:2].copy_(torch.tensor([9, 3])), "d2t does not ascend"),
    "short ids": (lambda t: t.update(d2t=t["d2t"].int()), "d2t is int32, it must be int64"),
    "floating ids": (lambda t: t.update(d2t=t["d2t"].float()), "d2t is float32, it must be int64"),
    "another t2d": (lambda t: t["t2d"].logical_not_(), "t2d marks other tokens than d2t leads to"),
    "t2d of numbers": (lambda t: t.update(t2d=t["t2d"].int()), "t2d is int32, it must be bool"),
}


@pytest.fixture
def exported(settings: Settings, make: Any, put: Any, look: Any) -> Callable[..., Any]:
    """`exported("vllm", "dflash")`: the folder of a fresh export, and its drafter's configuration."""

    def export_to(format_name: str, algorithm: str = "eagle3", **changes: Any) -> Any:
        drafter = make(algorithm, **changes)
        put(drafter)
        return look(export(settings, [format_name])[format_name]), drafter.config

    return export_to


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("damage", CONFIG_DAMAGE)
def test_a_damaged_configuration_is_refused(exported: Any, format_name: str, damage: str) -> None:
    edit, message = CONFIG_DAMAGE[damage]
    folder, config = exported(format_name)
    folder.edit(edit)

    with pytest.raises(DrafterError, match=message):
        check(folder.path, format_name, config)


@pytest.mark.parametrize("damage", LAYER_DAMAGE)
def test_layer_ids_that_the_engine_would_misread_are_refused(exported: Any, damage: str) -> None:
    format_name, edit, message = LAYER_DAMAGE[damage]
    folder, config = exported(format_name)
    folder.edit(edit)

    with pytest.raises(DrafterError, match=message):
        check(folder.path, format_name, config)


@pytest.mark.parametrize("format_name", ["vllm", "sglang"])
@pytest.mark.parametrize("damage", DFLASH_DAMAGE)
def test_a_damaged_configuration_of_dflash_is_refused(exported: Any, format_name: str, damage: str) -> None:
    edit, message = DFLASH_DAMAGE[damage]
    folder, config = exported(format_name, "dflash")
    folder.edit(edit)

    with pytest.raises(DrafterError, match=message):
        check(folder.path, format_name, config)


@pytest.mark.parametrize("format_name", ["vllm", "sglang"])
def test_a_causality_for_all_layers_is_refused_where_they_differ(exported: Any, format_name: str) -> None:
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    folder, config = exported(format_name, "dflash", **mixed)
    folder.edit(lambda c: c.update(is_causal=False))

    with pytest.raises(DrafterError, match="is_causal = false may not be there"):
        check(folder.path, format_name, config)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("damage", TENSOR_DAMAGE)
def test_a_damaged_tensor_is_refused(exported: Any, format_name: str, algorithm: str, damage: str) -> None:
    edit, message = TENSOR_DAMAGE[damage]
    folder, _ = exported(format_name, algorithm)
    folder.edit_tensors(edit)

    with pytest.raises(DrafterError, match=message):
        check(folder.path, format_name)


@pytest.mark.parametrize(
    ("format_name", "algorithm"),
    [("vllm", "eagle3"), ("sglang", "eagle3"), ("vllm", "dflash"), ("sglang", "dflash"), ("speculators", "dflash")],
)
def test_an_embedding_is_refused_where_the_target_s_is_shared(exported: Any, format_name: str, algorithm: str) -> None:
    folder, _ = exported(format_name, algorithm)
    folder.edit_tensors(lambda t: t.update({"embed_tokens.weight": torch.zeros(V, H)}))

    with pytest.raises(DrafterError, match=r"embed_tokens\.weight may not be there"):
        check(folder.path, format_name)


def test_eagle3_without_an_embedding_is_refused_for_speculators_which_would_take_what_is_in_memory(
    exported: Any,
) -> None:
    folder, _ = exported("speculators")
    folder.edit_tensors(lambda t: t.pop("embed_tokens.weight"))

    with pytest.raises(DrafterError, match=r"embed_tokens\.weight is missing"):
        check(folder.path, "speculators")


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("damage", VOCABULARY_DAMAGE)
def test_a_damaged_vocabulary_is_refused(exported: Any, format_name: str, damage: str) -> None:
    edit, message = VOCABULARY_DAMAGE[damage]
    folder, _ = exported(format_name, draft_vocab_size=48)
    folder.edit_tensors(edit)

    with pytest.raises(DrafterError, match=message):
        check(folder.path, format_name)


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        ("sglang", "vllm", "eagle_aux_hidden_state_layer_ids is missing"),
        ("speculators", "vllm", "vocab_size is missing"),
        ("vllm", "sglang", "eagle_config is missing"),
        ("vllm", "speculators", "transformer_layer_config is missing"),
    ],
)
def test_each_engine_refuses_the_folder_of_another(exported: Any, written: str, read: str, message: str) -> None:
    folder, _ = exported(written)

    with pytest.raises(DrafterError, match=message):
        check(folder.path, read)


def test_every_problem_is_named_at_once(exported: Any) -> None:
    folder, _ = exported("vllm")
    folder.edit(lambda c: c.update(tie_word_embeddings=True, mlp_bias=True))
    folder.edit_tensors(lambda t: t.pop("fc.weight"))

    with pytest.raises(DrafterError) as error:
        check(folder.path, "vllm")

    assert all(name in str(error.value) for name in ("tie_word_embeddings", "mlp_bias", "fc.weight"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", r"config\.json cannot be read"),
        ("config.json", b"[]", "holds list, not an object"),
        ("config.json", b"{}", "is missing"),
        ("model.safetensors", b"\x08\0\0", r"model\.safetensors cannot be read"),
    ],
)
@pytest.mark.parametrize("format_name", FORMATS)
def test_a_file_that_cannot_be_read_is_refused(
    exported: Any, format_name: str, name: str, content: bytes, message: str
) -> None:
    folder, _ = exported(format_name)
    (folder.path / name).write_bytes(content)

    with pytest.raises(DrafterError, match=message):
        check(folder.path, format_name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_missing_is_refused(exported: Any, name: str) -> None:
    folder, _ = exported("sglang")
    (folder.path / name).unlink()

    with pytest.raises(DrafterError, match=name.replace(".", r"\.") + " cannot be read"):
        check(folder.path, "sglang")


@pytest.mark.parametrize("name", ["vllm", "speculators"])
def test_vllm_hands_out_the_last_layer_and_none_beyond(settings: Settings, make: Any, put: Any, name: str) -> None:
    put(make(layers=[1, 3, 7]))
    export(settings, [name])

    put(make(layers=[1, 3, 8]), step=400)
    with pytest.raises(DrafterError, match=r"\[1, 3, 8\], the last that the engine hands out of this target is 7"):
        export(settings, [name])


def test_speculators_takes_one_of_two_norms(settings: Settings, make: Any, put: Any, tmp_path: Path) -> None:
    put(make(fc_norm=True, norm_before_fc=True))

    assert set(export(settings, [])) == {"vllm", "sglang"}
    with pytest.raises(DrafterError, match="fc_norm and norm_before_fc are both true"):
        export(settings, ["speculators"])
