"""What a step changes the drafter with: AdamW for all of it, or Muon for its matrices and AdamW for the rest.

Muon (Keller Jordan, 2024) makes the update of a matrix orthogonal. Its rate is scaled to the size of AdamW's updates
(Moonlight, arXiv 2502.16982). Output matrices and norms are AdamW's: Muon is for what maps hidden states to hidden
states, and bears a rate ten times as high.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from draftfleet.errors import SettingsError
from draftfleet.settings import Trainer

HEADS = ("lm_head.", "embed_tokens.")
"""Matrices with a row for each token."""

BESIDE_MUON = 0.1
"""The share of the learning rate that AdamW has where Muon has all of it."""

MUON_DECAY = 0.1
"""Of the matrices: each step takes this times its rate off them. Why: docs/decisions/0014-muon.md."""


class Optimizer(Protocol):
    """What the training loop needs of one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> Any: ...

    def zero_grad(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def make(knobs: Trainer, drafter: nn.Module) -> Optimizer:
    """The optimizer that `trainer.optimizer` names, over the weights that are trained. Raises SettingsError."""
    weights = {name: weight for name, weight in drafter.named_parameters() if weight.requires_grad}
    if knobs.optimizer == "adamw":
        return _adamw(knobs, list(weights.values()), share=1.0)
    if not hasattr(torch.optim, "Muon"):
        raise SettingsError(
            f"trainer.optimizer = muon needs torch 2.9 or newer, here is {torch.__version__}: install it, or choose "
            "trainer.optimizer = adamw."
        )
    is_matrix = {name: weight.ndim == 2 and not name.startswith(HEADS) for name, weight in weights.items()}
    matrices = [weight for name, weight in weights.items() if is_matrix[name]]
    muon = torch.optim.Muon(
        matrices, lr=knobs.lr, weight_decay=MUON_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    others = [weight for name, weight in weights.items() if not is_matrix[name]]
    return Several({"muon": muon, "adamw": _adamw(knobs, others, share=BESIDE_MUON)})


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("share", 1.0)


class Several:
    """Optimizers of disjoint weights, as one."""

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts.values() for group in part.param_groups]

    def step(self) -> None:
        for part in self._parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts.values():
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])


def _adamw(knobs: Trainer, weights: list[nn.Parameter], *, share: float) -> torch.optim.AdamW:
    group = {"params": weights, "share": share}
    return torch.optim.AdamW([group], lr=knobs.lr * share, betas=(0.9, 0.95), weight_decay=0.0)
