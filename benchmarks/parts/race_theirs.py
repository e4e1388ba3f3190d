"""The race's other side: speculators 0.9.0 as its own trainer steps, in the environment that has it.

The model is made by `from_training_args`, rows pass its `shift_batch` and `CollateFn`, the optimizers come from its
`build_optimizers` and the schedule is the one its trainer names, with its defaults wherever the recipe is silent. On a
CPU it needs `draft_attn_impl = sdpa` or `eager` (flex attention has no backward pass there), and eager losses (the
fused ones are Triton's).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from parts.race_child import read_order, serve
from parts.race_order import Order
from parts.race_rows import Example
from speculators.model import SpeculatorModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import create_transformer_layer_config, set_seed
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from speculators.train.utils import resolve_mask_token_id
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

SCHEDULES = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}
CLIP = 1.0


class Theirs:
    def __init__(self, order: Order) -> None:
        set_seed(order.seed)
        recipe = order.recipe
        is_eagle3 = order.algorithm == "eagle3"
        num_layers = 1 if is_eagle3 else order.num_layers
        decoder = create_transformer_layer_config(
            verifier_name_or_path=order.target,
            num_layers=num_layers,
            draft_arch="llama" if is_eagle3 else "qwen3",
            hidden_act=None,
            sliding_window=2048,
            full_attention_indices=list(range(num_layers)),
        )
        self.vocab_size: int = decoder.vocab_size
        arguments: dict[str, Any] = {
            "verifier_name_or_path": order.target,
            "draft_vocab_size": decoder.vocab_size,
            "target_layer_ids": [layer + 1 for layer in order.layers],
            "draft_attn_impl": recipe.get("attention", "sdpa"),
            "ttt_steps": order.ttt_steps,
            "ttt_step_loss_decay": 1.0,
            "norm_before_residual": recipe.get("norm_before_residual", True),
            "norm_before_fc": is_eagle3,
            "norm_output": is_eagle3,
            "block_size": order.block_size,
            # Full attention is never causal in its training; vLLM asks this flag for all layers.
            "sliding_window_non_causal": True,
            "mask_token_id": resolve_mask_token_id(order.target, decoder.vocab_size, None),
            "max_anchors": order.anchors,
            "per_position_loss_weight": "dpace",
            "loss_fn": "kl_div" if is_eagle3 else "ce",
            "loss_implementation": "eager",
        }
        model_class = (SpeculatorModel.registry or {})[order.algorithm]
        self._model = model_class.from_training_args(decoder, **arguments)
        self._model.train()
        self._call, _ = model_class.get_trainer_kwargs(**arguments)
        self._collate = CollateFn(
            order.batch_tokens,
            decoder.hidden_size,
            len(order.layers),
            torch.float32,
            shift_batch if is_eagle3 else None,
        )
        rate = recipe.get("lr", 1e-3)
        config = TrainerConfig(
            lr=rate,
            num_epochs=1,
            save_path="",
            optimizer=recipe.get("optimizer", "muon"),
            muon_lr=recipe.get("muon_lr", rate),
        )
        self._optimizers = build_optimizers(self._model, config)
        schedule = SCHEDULES[recipe.get("schedule", "linear")]
        warmup = int(order.steps * recipe.get("warmup", 0.01))
        self._schedules = [schedule(one, warmup, order.steps) for one in self._optimizers]

    def pack(self, examples: list[Example]) -> dict[str, Any]:
        batch = self._collate(
            [
                {
                    "hidden_states": one.hidden,
                    "input_ids": one.ids,
                    "verifier_last_hidden_states": one.last,
                    "loss_mask": one.mask,
                    "lengths": torch.tensor([len(one.ids)]),
                    "position_ids": torch.arange(len(one.ids)),
                }
                for one in examples
            ]
        )
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}

    def step(self, batch: dict[str, Any]) -> float:
        _, loss, _ = self._model(**batch, **self._call)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        for optimizer in self._optimizers:
            optimizer.step()
        for schedule in self._schedules:
            schedule.step()
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        self._model.save_pretrained(folder / "served")


if __name__ == "__main__":
    given = read_order()
    serve(given, Theirs(given))
