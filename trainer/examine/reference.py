"""The plain model of the target's folder, with no hook in it, as `output_hidden_states` of Hugging Face shows it."""

# T tokens, D hidden size of the target, L decoder layers, V vocabulary

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from draftfleet.settings import Settings
from trainer.devices import choose_dtype
from trainer.targets import weights


@dataclass(frozen=True, slots=True)
class States:
    """What the model says of one row, on the CPU in float32."""

    hidden: list[Tensor]  # L + 1 of (T, D): [k] enters layer k; the last has passed the final norm
    logits: Tensor  # (T, V)


class Reference:
    def __init__(self, model: Any, path: str) -> None:
        config = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.embedding: Tensor = model.get_input_embeddings().weight.detach().float().cpu()
        self.head: Tensor = model.get_output_embeddings().weight.detach().float().cpu()
        self.vocab_size = len(self.embedding)
        self.said = (
            f"{path} is a {type(model).__name__} of {self.num_layers} layers, width {config.hidden_size} and a "
            f"vocabulary of {self.vocab_size}, loaded in {model.dtype}".replace("torch.", "")
        )
        self._norm = copy.deepcopy(weights.find(model.get_decoder(), weights.FINAL_NORMS, path, "final norm"))
        self._norm.float().cpu()
        self.device: torch.device = model.device
        self._model: Any = model

    @classmethod
    def load(cls, settings: Settings, device: torch.device) -> Self:
        """Raises TargetError."""
        path = settings.target.path
        weights.check_path(path)
        place = settings.trainer.device_map or {"": device}
        return cls(weights.read(path, dtype=choose_dtype(settings.trainer.dtype, device), device_map=place), path)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """(T,) ids -> (T, V) float32 logits."""
        return self._model(ids[None].to(self.device), use_cache=False).logits[0].float()

    @torch.no_grad()
    def states(self, ids: Tensor) -> States:
        said = self._model(ids[None].to(self.device), output_hidden_states=True, use_cache=False)
        return States([one[0].float().cpu() for one in said.hidden_states], said.logits[0].float().cpu())

    @torch.no_grad()
    def normed(self, last: Tensor) -> Tensor:
        """The final norm in float32."""
        return self._norm(last.float().cpu())

    def let_go(self) -> None:
        """Free the model's memory; what was copied from it stays."""
        self._model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
