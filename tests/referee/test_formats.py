"""speculators 0.9.0 loads what is exported for it: no weight is missing, and its logits are ours."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import open_storage
from trainer import algorithms, checkpoint, targets
from trainer.checkpoint import State
from trainer.data import Journal
from trainer.export import export
from trainer.targets import Row

pytestmark = [pytest.mark.referee, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
STEPS = 3
ANCHOR = 20
TOLERANCE = 1e-4

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}

RECIPES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3-1": {"fc_norm": True, "norm_output": True},
    "eagle3-normed-before-fc": {"norm_before_fc": True, "norm_output": True},
    "eagle3-normed-residual": {"norm_before_residual": True},
    "eagle3-qwen3": {"style": "qwen3", "norm_before_residual": True},
    "eagle3-reduced": {"draft_vocab_size": 500},
    "eagle3-four-layers": {"layers": [0, 2, 4, 6]},
    "eagle3-yarn": {"rope_parameters": YARN},
    "dflash": {"algorithm": "dflash"},
    "dflash-yarn": {"algorithm": "dflash", "rope_parameters": YARN},
    "dflash-sliding": {"algorithm": "dflash", "layer_types": ["sliding_attention"] * 2, "sliding_window": 1024},
    "dflash-sliding-free": {
        "algorithm": "dflash",
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 1024,
        "causal": False,
    },
}


@pytest.fixture(scope="module")
def python() -> Path:
    path = Path(os.environ.get("SPECULATORS_PYTHON", HERE.parents[1] / ".venv-speculators/bin/python"))
    if not path.exists():
        pytest.fail(f"{path} is not there: `make referee` makes it, or SPECULATORS_PYTHON names another", pytrace=False)
    return path.absolute()


class Made:
    """A drafter of the tiny target with random weights, exported, and what we draft from on an input."""

    def __init__(self, name: str, target: Path, storage: Path) -> None:
        recipe = dict(RECIPES[name])
        algorithm = recipe.pop("algorithm", "eagle3")
        flags = {
            "run": name,
            "storage.url": str(storage),
            "target.path": str(target),
            "trainer.algorithm": algorithm,
            "trainer.layers": recipe.pop("layers", [0, 3, 6]),
            "dflash.num_layers": 2,
            "dflash.block_size": 8,
            "export.dtype": "float32",
        }
        self.settings = load(flags=flags)
        loaded = targets.load(self.settings, self.settings.trainer.layers, torch.device("cpu"))
        torch.manual_seed(len(name))
        config = replace(algorithms.configure(self.settings, loaded), **recipe)
        self.algorithm = algorithms.build(config, loaded)
        tensors = self.algorithm.drafter.state_dict()
        for tensor in tensors.values():
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.mul_(1 + 0.2 * torch.randn(tensor.shape))
        if config.draft_vocab_size:
            ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.isin(torch.arange(config.vocab_size), ids)
        self.algorithm.drafter.load_state_dict(tensors)
        self.algorithm.drafter.eval()
        self.drafted = (
            tensors["t2d"] if "t2d" in tensors else torch.ones(config.vocab_size, dtype=torch.bool)
        ).nonzero()
        self.folder = self._export(config, tensors)
        self.inputs = self._inputs(loaded, target)
        save_file(self.inputs, self.folder / "inputs.safetensors")

    def _export(self, config: Any, tensors: dict[str, Tensor]) -> Path:
        run = Run.create(open_storage(self.settings.storage.url), self.settings.run, {}, {})
        checkpoint.write(
            run.drafter_dir(self.settings.trainer.drafter),
            config=config,
            tensors=dict(tensors),
            state=State(step=1),
            optimizer={},
            journal=Journal(),
            keep=1,
        )
        return export(self.settings, ["speculators"])["speculators"]

    def _inputs(self, target: Any, folder: Path) -> dict[str, Tensor]:
        """EAGLE-3: each state with the token after it. DFlash: with its own, which its blocks begin at."""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = torch.tensor(
            tokenizer("Write a Python loop that prints the numbers from 24 to 35. Compute 7 * 8." * 2).input_ids
        )
        row = Row("0", ids, torch.ones_like(ids, dtype=torch.bool))
        (captured,) = next(iter(target.capture([[row]])))
        if self.algorithm.config.algorithm == "dflash":
            return {"ids": ids, "hidden": captured.hidden, "anchor": torch.tensor([ANCHOR])}
        return {"ids": ids[1:].contiguous(), "hidden": captured.hidden[:-1].contiguous()}

    @property
    def logits(self) -> Tensor:
        """Over the tokens that can be drafted: of EAGLE-3 (STEPS, n), at one position; of DFlash (B - 1, n)."""
        ids, hidden = self.inputs["ids"], self.inputs["hidden"]
        if "anchor" in self.inputs:
            draft = self.algorithm.proposer().propose(ids[1 : ANCHOR + 1], hidden[:ANCHOR], 7)
        else:
            forced = iter(ids[ANCHOR + 1 :])
            draft = self.algorithm.proposer().propose(
                ids[: ANCHOR + 1], hidden[: ANCHOR + 1], STEPS, lambda rows: next(forced).expand(len(rows))
            )
        return draft.logits[:, self.drafted[:, 0]]


def test_speculators_drafts_from_the_same_logits_and_no_weight_is_missing(
    python: Path, target: Path, tmp_path: Path, figure: Any
) -> None:
    made = {name: Made(name, target, tmp_path) for name in RECIPES}

    ended = subprocess.run(
        [python, HERE / "judge_formats.py", tmp_path / "logits", *(str(one.folder) for one in made.values())],
        capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr[-4000:]
    assert not any(json.loads(ended.stdout.splitlines()[-1]).values())
    theirs = load_file(tmp_path / "logits")
    furthest = {}
    for name, one in made.items():
        of_them = theirs[str(one.folder)]
        same = of_them[1:] if "anchor" in one.inputs else of_them[:, ANCHOR]
        furthest[name] = float((same - one.logits).abs().max())
        figure(f"logits of speculators, {name}, largest difference", furthest[name])
    assert max(furthest.values()) <= TOLERANCE, furthest
