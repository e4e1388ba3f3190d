"""Exported folders say what was trained, in each engine's own words."""

import json
import resource
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from draftfleet.errors import DrafterError, SettingsError, StorageUnwritable, TargetError
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer.export import FORMATS, check, export, serve_command

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
V = 128

RECIPES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "eagle3 normed before fc": {"norm_before_fc": True, "layers": [1, 4]},
    "eagle3 of a reduced vocabulary": {"draft_vocab_size": 48},
    "eagle3 of another tail": {"norm_before_residual": True, "style": "qwen3"},
    "dflash": {"algorithm": "dflash"},
    "dflash sliding": {
        "algorithm": "dflash",
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 32,
    },
    "dflash mixed": {
        "algorithm": "dflash",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
    },
    "dflash free everywhere": {
        "algorithm": "dflash",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "causal": False,
    },
}

LEFT_OUT = {
    "eagle3 of another tail": {"sglang"},
    "dflash mixed": {"speculators"},
}
"""Where an engine would serve it otherwise."""

by_recipe = pytest.mark.parametrize("recipe", RECIPES)


@by_recipe
def test_an_export_holds_the_trained_tensors_bit_for_bit(
    settings: Settings, make: Any, put: Any, look: Any, target: Path, recipe: str
) -> None:
    drafter = make(**RECIPES[recipe])
    put(drafter)

    folders = export(settings, [])

    assert set(folders) == set(FORMATS) - LEFT_OUT.get(recipe, set())
    for name, folder in folders.items():
        exported = look(folder).tensors
        if name == "speculators" and drafter.config.algorithm == "eagle3":
            assert torch.equal(exported.pop("embed_tokens.weight"), look(target).tensors["model.embed_tokens.weight"])
        said = {own.replace("midlayer.", "layers.0.") if name == "speculators" else own for own in drafter.tensors}
        assert exported.keys() == said
        for own, tensor in drafter.tensors.items():
            theirs = exported[own.replace("midlayer.", "layers.0.") if name == "speculators" else own]
            assert torch.equal(theirs, tensor), own
            assert theirs.dtype == tensor.dtype


@by_recipe
def test_a_fresh_export_passes_with_and_without_its_drafter(
    settings: Settings, make: Any, put: Any, recipe: str
) -> None:
    drafter = make(**RECIPES[recipe])
    put(drafter)

    for name, folder in export(settings, []).items():
        check(folder, name)
        check(folder, name, drafter.config)


def test_layers_0_2_5_of_eagle3_are_entered_as_1_3_6_for_vllm_and_stay_0_2_5_for_sglang(
    settings: Settings, make: Any, put: Any, look: Any
) -> None:
    put(make(layers=[0, 2, 5]))

    folders = export(settings, [])

    vllm, sglang, speculators = (look(folders[name]).config for name in ("vllm", "sglang", "speculators"))
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert "eagle_config" not in vllm
    assert sglang["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}
    assert "eagle_aux_hidden_state_layer_ids" not in sglang
    assert speculators["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    manifest = json.loads((folders["vllm"] / "export.json").read_text())
    assert (manifest["layers_after"], manifest["layers_before"]) == ([0, 2, 5], [1, 3, 6])


def test_layers_1_3_5_of_dflash_stay_so_in_the_native_form_and_are_2_4_6_for_speculators(
    settings: Settings, make: Any, put: Any, look: Any
) -> None:
    put(make("dflash", layers=[1, 3, 5]))

    folders = export(settings, [])

    for name in ("vllm", "sglang"):
        assert look(folders[name]).config["dflash_config"]["target_layer_ids"] == [1, 3, 5]
    speculators = look(folders["speculators"]).config
    assert speculators["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert "dflash_config" not in speculators


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"])
@pytest.mark.parametrize("is_set", [False, True])
def test_every_flag_that_an_engine_might_default_is_written(
    settings: Settings, make: Any, put: Any, look: Any, flag: str, is_set: bool
) -> None:
    put(make(**{flag: is_set}))

    for name, folder in export(settings, []).items():
        config = look(folder).config
        decoder = config.get("transformer_layer_config", config)
        assert config[flag] is is_set
        assert config["tie_word_embeddings"] is False
        assert decoder["num_hidden_layers"] == 1
        assert config["draft_vocab_size"] == decoder["vocab_size"] == V
        assert decoder["num_aux_hidden_states"] == 3
        assert decoder["max_position_embeddings"] == 4096
        assert (decoder["bos_token_id"], decoder["eos_token_id"], decoder["pad_token_id"]) == (1, [2, 3], 0)
        architecture = "Eagle3Speculator" if name == "speculators" else "LlamaForCausalLMEagle3"
        assert config["architectures"] == [architecture]


def test_block_mask_and_target_of_dflash_stand_wherever_an_engine_looks(
    settings: Settings, make: Any, put: Any, look: Any
) -> None:
    put(make("dflash", block_size=8, mask_token_id=7))

    folders = export(settings, [])

    for name in ("vllm", "sglang"):
        config = look(folders[name]).config
        assert config["architectures"] == ["DFlashDraftModel"]
        assert config["model_type"] == "qwen3"
        assert config["block_size"] == config["dflash_config"]["block_size"] == 8
        assert config["mask_token_id"] == config["dflash_config"]["mask_token_id"] == 7
        assert config["num_target_layers"] == 8
    speculators = look(folders["speculators"]).config
    assert (speculators["block_size"], speculators["mask_token_id"]) == (8, 7)
    assert speculators["sample_from_anchor"] is False
    (method,) = speculators["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == 7


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kinds", "causal", "flag", "non_causal"),
    [
        ([FULL, FULL], None, False, True),
        ([FULL, FULL], False, False, True),
        ([FULL, FULL], True, True, None),
        ([SLIDING, SLIDING], None, True, False),
        ([SLIDING, SLIDING], True, True, False),
        ([SLIDING, SLIDING], False, False, True),
        ([SLIDING, FULL], None, None, None),
        ([SLIDING, FULL], False, False, True),
        ([SLIDING, FULL], True, True, None),
    ],
)
def test_causality_is_told_in_each_engine_s_own_flag_or_the_format_refused(
    settings: Settings, make: Any, put: Any, look: Any, kinds: list[str], causal: Any, flag: Any, non_causal: Any
) -> None:
    put(make("dflash", layer_types=kinds, sliding_window=32, causal=causal))

    folders = export(settings, [])

    for name in ("vllm", "sglang"):
        config = look(folders[name]).config
        assert config.get("is_causal") is flag
        assert config["dflash_config"].get("causal") is flag
        assert config["layer_types"] == kinds
        assert config["use_sliding_window"] is (SLIDING in kinds)
        assert config["sliding_window"] == (32 if SLIDING in kinds else None)
    if non_causal is None:
        assert "speculators" not in folders
        with pytest.raises(DrafterError, match=r"speculators: .*(vLLM reads one|never causal)"):
            export(settings, ["speculators"])
    else:
        assert look(folders["speculators"]).config["sliding_window_non_causal"] is non_causal


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_yarn_survives_in_both_schemas_and_through_transformers(
    settings: Settings, make: Any, put: Any, look: Any, tmp_path: Path, format_name: str, algorithm: str
) -> None:
    put(make(algorithm, rope_parameters=YARN))

    config = look(export(settings, [format_name])[format_name]).config

    decoder = config.get("transformer_layer_config", config)
    assert decoder["rope_parameters"] == YARN
    assert decoder["rope_theta"] == 50000.0
    assert decoder["rope_scaling"] == {key: value for key, value in YARN.items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(decoder))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert {key: loaded.rope_parameters[key] for key in YARN} == YARN
    assert loaded.head_dim == 32


def test_speculators_finds_the_target_and_the_depth(
    settings: Settings, make: Any, put: Any, look: Any, target: Path
) -> None:
    put(make(ttt_steps=5))

    folder = export(settings, ["speculators"])["speculators"]

    said = look(folder).config["speculators_config"]
    assert said["verifier"] == {"name_or_path": str(target), "architectures": ["Qwen3ForCausalLM"]}
    assert said["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]


def test_the_target_may_be_named_as_others_know_it(settings: Settings, make: Any, put: Any, look: Any) -> None:
    put(make())
    named = settings.export.model_copy(update={"target_name": "Qwen/Qwen3-8B"})

    folder = export(settings.model_copy(update={"export": named}), ["speculators"])["speculators"]

    assert look(folder).config["speculators_config"]["verifier"]["name_or_path"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(("asked", "written"), [("auto", torch.bfloat16), ("float16", torch.float16)])
def test_weights_take_the_type_of_the_target_unless_another_is_asked_for(
    settings: Settings, make: Any, put: Any, look: Any, asked: str, written: torch.dtype
) -> None:
    drafter = make(draft_vocab_size=48)
    put(drafter)
    settings = settings.model_copy(update={"export": settings.export.model_copy(update={"dtype": asked})})

    folder = look(export(settings, ["vllm"])["vllm"])

    for name, tensor in drafter.tensors.items():
        assert torch.equal(folder.tensors[name], tensor.to(written) if tensor.is_floating_point() else tensor)
    assert folder.config["dtype"] == folder.config["torch_dtype"] == str(written).removeprefix("torch.")


def test_a_target_that_is_gone_is_named_together_with_the_setting_that_does_without(
    tmp_path: Path, make: Any, put: Any
) -> None:
    put(make(target=str(tmp_path / "gone")))
    settings = load(flags={"run": "demo", "storage.url": str(tmp_path / "storage")})

    with pytest.raises(TargetError, match=r"gone .* there is no such folder.*export\.dtype"):
        export(settings, ["vllm"])


# -- which checkpoint, and what it replaces


def test_the_newest_complete_checkpoint_is_exported(settings: Settings, put: Callable[..., Path]) -> None:
    put(step=900)
    newest = put(step=1000)
    torn = newest.with_name("step-001100")
    torn.mkdir()

    folder = export(settings, ["vllm"])["vllm"]

    assert json.loads((folder / "export.json").read_text())["step"] == 1000


def test_a_newer_checkpoint_replaces_an_older_export_and_never_the_other_way(
    settings: Settings, put: Callable[..., Path]
) -> None:
    older = put(step=200)
    export(settings, ["vllm"])
    newer = put(step=400)

    folder = export(settings, ["vllm"])["vllm"]
    assert json.loads((folder / "export.json").read_text())["step"] == 400

    newer.rename(older.parent / "aside")
    with pytest.raises(DrafterError, match=r"step 400, newer than the newest checkpoint, step 200"):
        export(settings, ["vllm"])
    assert json.loads((folder / "export.json").read_text())["step"] == 400
    assert [path.name for path in folder.parent.iterdir()] == ["vllm"]


def test_a_folder_that_draftfleet_did_not_write_is_left_alone(settings: Settings, put: Callable[..., Path]) -> None:
    mine = put().parents[1] / "export" / "vllm"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")

    with pytest.raises(DrafterError, match="no export of draftfleet"):
        export(settings, ["vllm"])
    assert (mine / "notes.txt").read_text() == "mine"


def test_without_a_checkpoint_it_says_to_train_first(settings: Settings) -> None:
    Run.create(open_storage(settings.storage.url), settings.run, {}, {})

    with pytest.raises(DrafterError, match="draftfleet train"):
        export(settings, ["vllm"])


def test_an_unknown_format_is_refused_with_those_that_are_known(settings: Settings, put: Callable[..., Path]) -> None:
    put()

    with pytest.raises(SettingsError, match="onnx: unknown; known are vllm, sglang, speculators"):
        export(settings, ["vllm", "onnx"])


def test_a_drafter_that_is_broken_is_never_put_in_place(settings: Settings, make: Any, put: Any) -> None:
    drafter = make()
    drafter.tensors["norm.weight"][3] = float("nan")
    written = put(drafter)

    with pytest.raises(DrafterError, match=r"norm\.weight has 1 values that are not finite"):
        export(settings, ["vllm"])
    assert list((written.parents[1] / "export").iterdir()) == []


def test_a_full_folder_is_said_so_and_the_earlier_export_stays(settings: Settings, make: Any, put: Any) -> None:
    put(step=100)
    folder = export(settings, ["vllm"])["vllm"]
    put(step=200)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "config.json").stat().st_size + 5_000, hard))
    try:
        with pytest.raises(StorageUnwritable, match=r"could not write \S+/vllm: .* Make room"):
            export(settings, ["vllm"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)

    assert [path.name for path in folder.parent.iterdir()] == ["vllm"]
    assert json.loads((folder / "export.json").read_text())["step"] == 100


def test_a_drafter_that_no_format_can_hold_is_refused_with_the_reason_of_each(
    settings: Settings, make: Any, put: Any
) -> None:
    put(make("dflash", block_size=1))

    with pytest.raises(DrafterError) as error:
        export(settings, [])

    assert str(error.value).count("block_size is 1, it must be at least 2") == len(FORMATS)


# -- commands


def test_serve_commands_of_eagle3_name_the_folder_and_the_depth(settings: Settings, put: Callable[..., Path]) -> None:
    put()
    folders = export(settings, [])

    commands = {name: shlex.split(serve_command(name, folder, "Qwen/Qwen3-8B", 3)) for name, folder in folders.items()}

    for name in ("vllm", "speculators"):
        assert commands[name][:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
        said = {"method": "eagle3", "model": str(folders[name]), "num_speculative_tokens": 3}
        assert json.loads(commands[name][-1]) == said
    sglang = commands["sglang"]
    assert dict(zip(sglang[3::2], sglang[4::2], strict=True)) == {
        "--model-path": "Qwen/Qwen3-8B",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(folders["sglang"]),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }


@pytest.mark.parametrize(("k", "drafted"), [(3, 3), (7, 7), (15, 7)])
def test_serve_commands_of_dflash_ask_for_no_more_than_a_block(
    settings: Settings, make: Any, put: Any, k: int, drafted: int
) -> None:
    put(make("dflash", block_size=8))
    folders = export(settings, [])

    vllm = shlex.split(serve_command("vllm", folders["vllm"], "Qwen/Qwen3-8B", k))
    sglang = shlex.split(serve_command("sglang", folders["sglang"], "Qwen/Qwen3-8B", k))

    said = {"method": "dflash", "model": str(folders["vllm"]), "num_speculative_tokens": drafted}
    assert json.loads(vllm[-1]) == said
    assert dict(zip(sglang[3::2], sglang[4::2], strict=True)) == {
        "--model-path": "Qwen/Qwen3-8B",
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": str(folders["sglang"]),
        "--speculative-num-draft-tokens": str(drafted + 1),
    }


def test_layers_of_two_kinds_need_the_newer_runner_of_vllm(settings: Settings, make: Any, put: Any) -> None:
    put(make("dflash", layer_types=[SLIDING, FULL], sliding_window=32))

    command = serve_command("vllm", export(settings, ["vllm"])["vllm"], "Qwen/Qwen3-8B", 7)

    assert command.startswith("env VLLM_USE_V2_MODEL_RUNNER=1 vllm serve Qwen/Qwen3-8B ")


# -- the embedding that one format brings


def test_an_embedding_is_found_in_the_shard_that_the_index_names(
    settings: Settings, make: Any, put: Any, look: Any, target: Path
) -> None:
    put(make())
    whole = look(target).tensors["model.embed_tokens.weight"]
    (target / "model.safetensors").unlink()
    name, file = "model.language_model.embed_tokens.weight", "model-00002-of-00002.safetensors"
    save_file({name: whole}, target / file)
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors", name: file}})
    )

    folder = export(settings, ["speculators"])["speculators"]

    assert torch.equal(look(folder).tensors["embed_tokens.weight"], whole)


def test_a_target_without_an_embedding_of_the_drafter_s_size_is_told(
    settings: Settings, make: Any, put: Any, target: Path
) -> None:
    put(make())
    save_file({"model.embed_tokens.weight": torch.zeros(99, 64)}, target / "model.safetensors")

    with pytest.raises(TargetError, match="no embedding of 128 tokens and width 64"):
        export(settings, ["speculators"])
