"""What is written is read back: our own folders and those of other makers, to the same drafter and the same logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftfleet.errors import DrafterError
from draftfleet.settings import Settings
from trainer import algorithms, drafter
from trainer.drafter import DrafterConfig
from trainer.export import FORMATS, export
from trainer.export.importing import load
from trainer.export.native import causality

D, V = 64, 128

RECIPES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3 of layers 2, 4, 6, 7": {"layers": [2, 4, 6, 7]},
    "eagle3 of a reduced vocabulary": {"draft_vocab_size": 48},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "draft_vocab_size": 48},
    "eagle3 normed before fc": {"norm_before_fc": True, "norm_output": True},
    "eagle3 with a normed residual": {"norm_before_residual": True},
    "eagle3 with normed heads": {"style": "qwen3", "norm_before_residual": True, "fc_norm": True},
    "eagle3 with YaRN": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
    "dflash": {"algorithm": "dflash"},
    "dflash of four layers": {"algorithm": "dflash", "num_layers": 4, "layer_types": ["full_attention"] * 4},
    "dflash causal": {"algorithm": "dflash", "causal": True},
    "dflash sliding": {"algorithm": "dflash", "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    "dflash sliding free": {
        "algorithm": "dflash",
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 4,
        "causal": False,
    },
    "dflash mixed": {
        "algorithm": "dflash",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
}


class FakeTarget:
    """As much of a target as drafting needs."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(11)
        self.embedding = torch.randn(V, D, generator=dice)
        self.head = torch.randn(V, D, generator=dice)
        self.norm_scale = torch.ones(D)
        self.config = SimpleNamespace()
        self.layers = [0, 2, 5]

    def logits(self, last: Tensor) -> Tensor:
        return last @ self.head.T


def logits_of(config: DrafterConfig, tensors: dict[str, Tensor]) -> Tensor:
    """What the algorithm itself drafts from, in two calls, the second after more of the answer is known."""
    target: Any = FakeTarget()
    algorithm = algorithms.build(config, target)
    algorithm.drafter.load_state_dict(tensors)
    algorithm.drafter.eval()
    dice = torch.Generator().manual_seed(5)
    hidden = torch.randn(9, len(config.layers) * D, generator=dice)
    ids = torch.randint(V, (9,), generator=dice)
    with torch.no_grad():
        proposer = algorithm.proposer()
        drafts = [proposer.propose(ids[:6], hidden[:6], 3), proposer.propose(ids[6:], hidden[6:], 3)]
    return torch.cat([draft.logits for draft in drafts])


def settled(config: DrafterConfig) -> DrafterConfig:
    """Causality said in one way where there are two."""
    return dataclasses.replace(config, causal=causality(config)) if config.algorithm == "dflash" else config


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("as_other_makers", [False, True], ids=["ours", "theirs"])
def test_a_drafter_comes_back_from_each_format_as_it_was_and_drafts_the_same(
    settings: Settings, make: Any, put: Any, recipe: str, format_name: str, as_other_makers: bool
) -> None:
    made = make(**RECIPES[recipe])
    put(made)
    folders = export(settings, [])
    if format_name not in folders:
        pytest.skip("this format cannot hold it")
    folder = folders[format_name]
    if as_other_makers:
        (folder / "export.json").unlink()

    config, tensors = load(folder, num_target_layers=8)

    if as_other_makers:  # what no config.json has a place for
        config = dataclasses.replace(config, target=made.config.target, extra=made.config.extra)
    assert settled(config) == settled(made.config)
    assert tensors.keys() == made.tensors.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in made.tensors.items())
    assert torch.equal(logits_of(config, tensors), logits_of(made.config, made.tensors))


def test_what_only_training_knows_comes_back_from_our_own_folders(settings: Settings, make: Any, put: Any) -> None:
    made = make(ttt_steps=7, step_decay=0.5, extra={"note": [1]})
    put(made)

    for folder in export(settings, []).values():
        assert load(folder)[0] == made.config


def test_our_own_drafters_are_read_as_they_are(make: Any, tmp_path: Path) -> None:
    made = make(draft_vocab_size=48)
    drafter.save(tmp_path, made.config, made.tensors)

    config, tensors = load(tmp_path)

    assert config == made.config
    assert all(torch.equal(tensors[name], tensor) for name, tensor in made.tensors.items())


def test_weights_become_float32(settings: Settings, make: Any, put: Any) -> None:
    made = make(draft_vocab_size=48)
    put(made)
    halved = settings.model_copy(update={"export": settings.export.model_copy(update={"dtype": "bfloat16"})})

    _, tensors = load(export(halved, ["vllm"])["vllm"])

    assert tensors["fc.weight"].dtype == torch.float32
    assert torch.equal(tensors["fc.weight"], made.tensors["fc.weight"].bfloat16().float())
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)


# -- folders as other makers write them


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    """`theirs(config, tensors)` writes a folder of another origin."""

    def write(config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write


SPECFORGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "vocab_size": V,
    "draft_vocab_size": 48,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True},
}


def test_a_folder_of_specforge_has_the_old_rope_an_embedding_and_nested_a_ids(theirs: Any, make: Any) -> None:
    made = make(draft_vocab_size=48)
    folder = theirs(SPECFORGE, {**made.tensors, "embed_tokens.weight": torch.zeros(V, D)})

    config, tensors = load(folder, num_target_layers=8)

    assert config.layers == [0, 2, 5]
    assert config.num_target_layers == 8
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert (config.norm_before_residual, config.fc_norm, config.norm_output) == (False, False, False)
    assert tensors.keys() == made.tensors.keys()


def test_older_names_of_norms_and_of_the_layer_are_known(theirs: Any, make: Any) -> None:
    made = make(fc_norm=True, draft_vocab_size=48)
    old = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}
    old |= {"midlayer.": "layers.0."}

    def rename(name: str) -> str:
        for ours, other in old.items():
            name = name.replace(ours, other)
        return f"model.{name}"

    folder = theirs({**SPECFORGE, "fc_norm": True}, {rename(name): one for name, one in made.tensors.items()})

    assert load(folder)[1].keys() == made.tensors.keys()


@pytest.mark.parametrize("missing", ["d2t", "t2d"])
def test_either_mapping_of_a_vocabulary_makes_the_other(theirs: Any, make: Any, missing: str) -> None:
    made = make(draft_vocab_size=48)
    folder = theirs(SPECFORGE, {name: one for name, one in made.tensors.items() if name != missing})

    assert torch.equal(load(folder)[1][missing], made.tensors[missing])


def test_mappings_of_a_whole_vocabulary_are_left_out(theirs: Any, make: Any) -> None:
    made = make()
    mappings = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    folder = theirs({**SPECFORGE, "draft_vocab_size": V}, made.tensors | mappings)

    config, tensors = load(folder)

    assert config.draft_vocab_size is None
    assert tensors.keys() == made.tensors.keys()


def test_without_layer_ids_the_engines_default_is_taken_if_the_target_s_depth_is_known(theirs: Any, make: Any) -> None:
    made = make(draft_vocab_size=48)
    folder = theirs({name: value for name, value in SPECFORGE.items() if name != "eagle_config"}, made.tensors)

    with pytest.raises(DrafterError, match=r"layer_ids is missing\. Without layer ids an engine guesses"):
        load(folder)
    assert load(folder, num_target_layers=36)[0].layers == [1, 17, 32]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, "name other layers"),
        ({"attention_sink_bias": True}, "attention_sink_bias = True, which no drafter"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, it must be 1"),
        ({"intermediate_size": 128}, r"gate_proj\.weight has shape \(96, 64\), it must be \(128, 64\)"),
        ({"fc_norm": True}, r"fc_norm\.0\.weight is missing"),
        ({"target_hidden_size": 128}, "hidden_size is 64, it must be target_hidden_size"),
    ],
)
def test_what_no_drafter_of_ours_is_is_refused(theirs: Any, make: Any, changes: dict[str, Any], message: str) -> None:
    folder = theirs({**SPECFORGE, **changes}, make(draft_vocab_size=48).tensors)

    with pytest.raises(DrafterError, match=message):
        load(folder)


def test_a_tensor_that_is_not_known_is_refused(theirs: Any, make: Any) -> None:
    made = make(draft_vocab_size=48)
    folder = theirs(SPECFORGE, {**made.tensors, "mask_hidden": torch.zeros(1, 192)})

    with pytest.raises(DrafterError, match="mask_hidden is not known"):
        load(folder)


def test_speculators_must_say_what_its_readers_take_differently(
    settings: Settings, make: Any, put: Any, look: Any
) -> None:
    put(make())
    folder = look(export(settings, ["speculators"])["speculators"])
    folder.edit(lambda c: c.pop("norm_before_residual"))

    with pytest.raises(DrafterError, match="norm_before_residual is missing"):
        load(folder.path)


ZLAB: dict[str, Any] = {
    **{name: value for name, value in SPECFORGE.items() if name not in ("eagle_config", "draft_vocab_size")},
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 36,
    "block_size": 16,
    "rope_scaling": None,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9, 17]},
}


def test_a_folder_of_z_lab_s_dflash_is_free_of_causality_where_it_does_not_slide(theirs: Any, make: Any) -> None:
    made = make("dflash")

    config, tensors = load(theirs(ZLAB, made.tensors))

    assert (config.layers, config.num_target_layers) == ([1, 9, 17], 36)
    assert (config.block_size, config.mask_token_id) == (16, 7)
    assert causality(config) is False
    assert tensors.keys() == made.tensors.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 7}}, r"target_layer_ids is missing"),
        ({"dflash_config": {"target_layer_ids": [1, 9, 17]}}, r"mask_token_id is missing"),
        ({"dflash_config": {**ZLAB["dflash_config"], "conv_kernel_size": 2}}, "conv_kernel_size = 2"),
        ({"dflash_config": {**ZLAB["dflash_config"], "selector_rank": 256}}, "selector_rank = 256"),
        ({"block_size": None}, "block_size is missing"),
        ({"num_hidden_layers": 3}, r"layers\.2\.self_attn\.q_proj\.weight is missing"),
    ],
)
def test_a_folder_of_dflash_that_is_not_whole_or_of_a_later_variant_is_refused(
    theirs: Any, make: Any, changes: dict[str, Any], message: str
) -> None:
    folder = theirs({**ZLAB, **changes}, make("dflash").tensors)

    with pytest.raises(DrafterError, match=message):
        load(folder)


def test_a_folder_that_is_no_drafter_is_told(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="is no drafter: it has neither"):
        load(tmp_path)
