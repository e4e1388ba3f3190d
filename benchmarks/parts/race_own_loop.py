"""Acceptance of an exported folder, of whichever trainer, in our own draft-and-verify loop."""

from __future__ import annotations

from pathlib import Path

import torch

from draftfleet.settings import load
from trainer import algorithms, targets
from trainer.export import importing
from trainer.speculate import Limits, decode_with_drafter
from trainer.targets.hf import HfTarget


def acceptance(folder: Path, target_path: str, prompts: list[list[int]], k: int, max_tokens: int) -> float:
    """1 + accepted / drafts, over all prompts together: counted as vLLM counts."""
    torch.set_num_threads(1)
    settings = load(flags={"target.path": target_path, "trainer.dtype": "float32", "trainer.device": "cpu"})
    layers = importing.read(folder, 8).config.layers
    target = targets.load(settings, layers, torch.device("cpu"))
    assert isinstance(target, HfTarget)
    imported = importing.read(folder, target.config.num_hidden_layers)
    algorithm = algorithms.build(imported.config, target)
    algorithm.drafter.load_state_dict(imported.tensors)
    limits = Limits(max_tokens, context_tokens=1024)
    kept = [
        accepted
        for prompt in prompts
        for accepted in decode_with_drafter(target, algorithm.proposer(), prompt, limits, k).accepted
    ]
    return 1 + sum(kept) / len(kept)
