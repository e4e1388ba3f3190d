"""Exported folders say what was trained, in each engine's own words, and the checker refuses those that do not."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftfleet.errors import DrafterError, SettingsError, TargetError
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer import checkpoint
from trainer.checkpoint import State
from trainer.data import Journal
from trainer.drafter import DrafterConfig
from trainer.export import FORMATS, check, export, serve_command

TARGET = Path(__file__).parents[2] / "examples" / "tiny-target"
H, D, INNER, V, Q, KV = 64, 64, 96, 128, 4 * 32, 2 * 32
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

Edit = Callable[[dict[str, Any]], object]


def drafter_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "algorithm": "eagle3",
        "target": str(TARGET),
        "layers": [0, 2, 5],
        "num_target_layers": 8,
        "target_hidden_size": D,
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
    }
    return DrafterConfig(**{**values, **changes})


def drafter_tensors() -> dict[str, torch.Tensor]:
    """The native names and shapes, written out by hand."""
    shapes = {
        "fc.weight": (H, 3 * D),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (Q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, Q),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (INNER, H),
        "midlayer.mlp.up_proj.weight": (INNER, H),
        "midlayer.mlp.down_proj.weight": (H, INNER),
        "norm.weight": (H,),
        "lm_head.weight": (V, H),
    }
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(flags={"run": "demo", "storage.url": str(tmp_path), "export.dtype": "float32"})


def add_checkpoint(
    settings: Settings,
    step: int,
    config: DrafterConfig | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    run = Run.create(open_storage(settings.storage.url), settings.run, {}, {})
    return checkpoint.write(
        run.drafter_dir(settings.trainer.drafter),
        config=config or drafter_config(),
        tensors=tensors or drafter_tensors(),
        state=State(step=step),
        optimizer={},
        journal=Journal(),
        keep=9,
    )


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, edit: Edit) -> None:
    config = config_of(folder)
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_an_export_holds_the_trained_tensors_bit_for_bit(settings: Settings) -> None:
    add_checkpoint(settings, 200)

    folders = export(settings, [])

    assert set(folders) == {"vllm", "sglang"}
    for folder in folders.values():
        exported = load_file(folder / "model.safetensors")
        assert exported.keys() == drafter_tensors().keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in drafter_tensors().items())


def test_layers_0_2_5_are_entered_as_1_3_6_for_vllm_and_stay_0_2_5_for_sglang(settings: Settings) -> None:
    add_checkpoint(settings, 200, drafter_config(layers=[0, 2, 5]))

    folders = export(settings, ["vllm", "sglang"])

    vllm, sglang = config_of(folders["vllm"]), config_of(folders["sglang"])
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert "eagle_config" not in vllm
    assert sglang["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}
    assert "eagle_aux_hidden_state_layer_ids" not in sglang
    manifest = json.loads((folders["vllm"] / "export.json").read_text())
    assert (manifest["layers_after"], manifest["layers_before"]) == ([0, 2, 5], [1, 3, 6])


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_flag_that_an_engine_might_default_is_written(settings: Settings, format_name: str) -> None:
    add_checkpoint(settings, 200)

    config = config_of(export(settings, [format_name])[format_name])

    flags = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc", "tie_word_embeddings")
    assert all(config[flag] is False for flag in flags)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == config["vocab_size"] == V
    assert config["num_aux_hidden_states"] == 3
    assert config["max_position_embeddings"] == 4096
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 3], 0)


@pytest.mark.parametrize("format_name", FORMATS)
def test_yarn_survives_in_both_schemas_and_through_transformers(settings: Settings, format_name: str) -> None:
    add_checkpoint(settings, 200, drafter_config(rope_parameters=YARN))

    folder = export(settings, [format_name])[format_name]

    config = config_of(folder)
    assert config["rope_parameters"] == YARN
    assert config["rope_theta"] == 50000.0
    assert config["rope_scaling"] == {key: value for key, value in YARN.items() if key != "rope_theta"}
    loaded = AutoConfig.from_pretrained(folder)
    assert {key: loaded.rope_parameters[key] for key in YARN} == YARN
    assert loaded.head_dim == 32


@pytest.mark.parametrize(("asked", "written"), [("auto", torch.bfloat16), ("float16", torch.float16)])
def test_weights_take_the_type_of_the_target_unless_another_is_asked_for(
    tmp_path: Path, asked: str, written: torch.dtype
) -> None:
    settings = load(flags={"run": "demo", "storage.url": str(tmp_path), "export.dtype": asked})
    add_checkpoint(settings, 200)

    folder = export(settings, ["vllm"])["vllm"]

    exported = load_file(folder / "model.safetensors")
    assert all(torch.equal(exported[name], tensor.to(written)) for name, tensor in drafter_tensors().items())
    assert config_of(folder)["dtype"] == config_of(folder)["torch_dtype"] == str(written).removeprefix("torch.")


def test_a_target_that_is_gone_is_named_together_with_the_setting_that_does_without(tmp_path: Path) -> None:
    settings = load(flags={"run": "demo", "storage.url": str(tmp_path)})
    add_checkpoint(settings, 200, drafter_config(target=str(tmp_path / "gone")))

    with pytest.raises(TargetError, match=r"gone.*export\.dtype"):
        export(settings, ["vllm"])


# -- which checkpoint, and what it replaces


def test_the_newest_complete_checkpoint_is_exported(settings: Settings) -> None:
    add_checkpoint(settings, 900)
    newest = add_checkpoint(settings, 1000)
    torn = newest.with_name("step-001100")
    torn.mkdir()

    folder = export(settings, ["vllm"])["vllm"]

    assert json.loads((folder / "export.json").read_text())["step"] == 1000


def test_a_newer_checkpoint_replaces_an_older_export_and_never_the_other_way(settings: Settings) -> None:
    older = add_checkpoint(settings, 200)
    export(settings, ["vllm"])
    newer = add_checkpoint(settings, 400)

    folder = export(settings, ["vllm"])["vllm"]
    assert json.loads((folder / "export.json").read_text())["step"] == 400

    newer.rename(older.parent / "aside")
    with pytest.raises(DrafterError, match=r"step 400, newer than the newest checkpoint, step 200"):
        export(settings, ["vllm"])
    assert json.loads((folder / "export.json").read_text())["step"] == 400
    assert [path.name for path in folder.parent.iterdir()] == ["vllm"]


def test_a_folder_that_draftfleet_did_not_write_is_left_alone(settings: Settings) -> None:
    mine = add_checkpoint(settings, 200).parents[1] / "export" / "vllm"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")

    with pytest.raises(DrafterError, match="no export of draftfleet"):
        export(settings, ["vllm"])
    assert (mine / "notes.txt").read_text() == "mine"


def test_without_a_checkpoint_it_says_to_train_first(settings: Settings) -> None:
    Run.create(open_storage(settings.storage.url), settings.run, {}, {})

    with pytest.raises(DrafterError, match="draftfleet train"):
        export(settings, ["vllm"])


def test_an_unknown_format_is_refused_with_those_that_are_known(settings: Settings) -> None:
    add_checkpoint(settings, 200)

    with pytest.raises(SettingsError, match="onnx: unknown; known are vllm, sglang"):
        export(settings, ["vllm", "onnx"])


def test_a_drafter_that_is_broken_is_never_put_in_place(settings: Settings) -> None:
    tensors = drafter_tensors()
    tensors["norm.weight"][3] = float("nan")
    written = add_checkpoint(settings, 200, tensors=tensors)

    with pytest.raises(DrafterError, match=r"norm\.weight has 1 values that are not finite"):
        export(settings, ["vllm"])
    assert list((written.parents[1] / "export").iterdir()) == []


def test_the_output_of_the_last_layer_goes_to_vllm_but_sglang_does_not_hand_it_out(settings: Settings) -> None:
    add_checkpoint(settings, 200, drafter_config(layers=[1, 3, 7]))

    export(settings, ["vllm"])

    with pytest.raises(DrafterError, match=r"\[1, 3, 7\], the last that the engine hands out of this target is 6"):
        export(settings, ["sglang"])


# -- the checker

CONFIG_DAMAGE: dict[str, tuple[Edit, str]] = {
    "a flag left out": (lambda c: c.pop("norm_before_residual"), "norm_before_residual is missing, it must be false"),
    "a flag turned": (lambda c: c.update(norm_output=True), "norm_output is true, it must be false"),
    "a norm per layer": (lambda c: c.update(fc_norm=True), "fc_norm is true, it must be false"),
    "tied embeddings": (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "another architecture": (lambda c: c.update(architectures=["LlamaForCausalLM"]), "architectures is"),
    "two layers": (lambda c: c.update(num_hidden_layers=2), "num_hidden_layers is 2, it must be 1"),
    "no vocabulary": (lambda c: c.pop("vocab_size"), "vocab_size is missing"),
    "a cut vocabulary": (lambda c: c.update(draft_vocab_size=32), "draft_vocab_size is 32, it must be 128"),
    "the old rope only": (lambda c: c.pop("rope_parameters"), "rope_parameters is missing"),
    "two ropes": (lambda c: c.update(rope_theta=5.0), r"rope_theta is 5\.0, it must be 10000\.0"),
    "no rope theta": (lambda c: c["rope_parameters"].pop("rope_theta"), r"rope_parameters\.rope_theta is missing"),
    "a shorter context": (lambda c: c.update(max_position_embeddings=64), "max_position_embeddings is 64"),
    "no type": (lambda c: c.pop("dtype"), "dtype is missing"),
    "two types": (lambda c: c.update(torch_dtype="float16"), 'torch_dtype is "float16", it must be "float32"'),
    "a width of its own": (lambda c: c.update(hidden_size=32), "hidden_size is 32, it must be target_hidden_size"),
    "fewer layers seen": (lambda c: c.update(num_aux_hidden_states=2), "num_aux_hidden_states is 2, it must be 3"),
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
    "vllm with ids that are no numbers": (
        "vllm",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=["low"]),
        "invalid literal",
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
        r"\[1, 3, 6\].* it must be .*\[0, 2, 5\]",
    ),
    "sglang without aux states": (
        "sglang",
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "eagle_config is",
    ),
    "sglang with ids of vllm": (
        "sglang",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 6]),
        "eagle_aux_hidden_state_layer_ids = .* may not be there",
    ),
}

TENSOR_DAMAGE: dict[str, tuple[Edit, str]] = {
    "missing": (lambda t: t.pop("midlayer.hidden_norm.weight"), r"midlayer\.hidden_norm\.weight is missing"),
    "extra": (lambda t: t.update({"d2t": torch.zeros(V)}), "d2t may not be there"),
    "embedding": (lambda t: t.update({"embed_tokens.weight": torch.zeros(V, H)}), r"embed_tokens\.weight may not be"),
    "nan": (lambda t: t["fc.weight"].view(-1)[5:7].fill_(float("nan")), r"fc\.weight has 2 values that are not finite"),
    "inf": (lambda t: t["lm_head.weight"].view(-1)[:1].fill_(float("inf")), r"lm_head\.weight has 1 values"),
    "shape": (
        lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.zeros(Q, H)}),
        r"q_proj\.weight has shape \(128, 64\), it must be \(128, 128\)",
    ),
    "type": (
        lambda t: t.update({"norm.weight": t["norm.weight"].half()}),
        r"norm\.weight is float16, config\.json says float32",
    ),
}


@pytest.fixture
def exported(settings: Settings) -> dict[str, Path]:
    add_checkpoint(settings, 200)
    return export(settings, [])


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_fresh_export_passes_with_and_without_its_drafter(exported: dict[str, Path], format_name: str) -> None:
    check(exported[format_name], format_name)
    check(exported[format_name], format_name, drafter_config())


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("damage", CONFIG_DAMAGE)
def test_a_damaged_configuration_is_refused(exported: dict[str, Path], format_name: str, damage: str) -> None:
    edit, message = CONFIG_DAMAGE[damage]
    edit_config(exported[format_name], edit)

    with pytest.raises(DrafterError, match=message):
        check(exported[format_name], format_name, drafter_config())


@pytest.mark.parametrize("damage", LAYER_DAMAGE)
def test_layer_ids_that_the_engine_would_misread_are_refused(exported: dict[str, Path], damage: str) -> None:
    format_name, edit, message = LAYER_DAMAGE[damage]
    edit_config(exported[format_name], edit)

    with pytest.raises(DrafterError, match=message):
        check(exported[format_name], format_name, drafter_config())


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("damage", TENSOR_DAMAGE)
def test_a_damaged_tensor_is_refused(exported: dict[str, Path], format_name: str, damage: str) -> None:
    edit, message = TENSOR_DAMAGE[damage]
    edit_tensors(exported[format_name], edit)

    with pytest.raises(DrafterError, match=message):
        check(exported[format_name], format_name)


def test_each_engine_refuses_the_folder_of_the_other(exported: dict[str, Path]) -> None:
    with pytest.raises(DrafterError, match="eagle_aux_hidden_state_layer_ids is missing"):
        check(exported["sglang"], "vllm")
    with pytest.raises(DrafterError, match="eagle_config is missing"):
        check(exported["vllm"], "sglang")


def test_every_problem_is_named_at_once(exported: dict[str, Path]) -> None:
    edit_config(exported["vllm"], lambda c: c.update(norm_output=True, mlp_bias=True))
    edit_tensors(exported["vllm"], lambda t: t.pop("fc.weight"))

    with pytest.raises(DrafterError) as error:
        check(exported["vllm"], "vllm")

    assert all(name in str(error.value) for name in ("norm_output", "mlp_bias", "fc.weight"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", r"config\.json cannot be read"),
        ("config.json", b"[]", "holds list, not an object"),
        ("model.safetensors", b"\x08\0\0", r"model\.safetensors cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    exported: dict[str, Path], name: str, content: bytes, message: str
) -> None:
    (exported["vllm"] / name).write_bytes(content)

    with pytest.raises(DrafterError, match=message):
        check(exported["vllm"], "vllm")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_missing_is_refused(exported: dict[str, Path], name: str) -> None:
    (exported["sglang"] / name).unlink()

    with pytest.raises(DrafterError, match=name.replace(".", r"\.") + " cannot be read"):
        check(exported["sglang"], "sglang")


def test_serve_commands_name_the_folder_and_the_depth() -> None:
    folder = Path("/models/my drafter")

    vllm = shlex.split(serve_command("vllm", folder, "Qwen/Qwen3-8B", 3))
    sglang = shlex.split(serve_command("sglang", folder, "Qwen/Qwen3-8B", 3))

    assert vllm[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert json.loads(vllm[-1]) == {"method": "eagle3", "model": "/models/my drafter", "num_speculative_tokens": 3}
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options == {
        "--model-path": "Qwen/Qwen3-8B",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "/models/my drafter",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }
