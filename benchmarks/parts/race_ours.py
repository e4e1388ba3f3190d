"""The race's own side: this project's trainer, step by step, on batches that are cut already."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).parents[1]))

from parts.race_child import read_order, serve
from parts.race_order import Order
from parts.race_rows import Example

from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer import algorithms, checkpoint, optimizers, targets
from trainer.checkpoint import State
from trainer.data import Journal
from trainer.export import export
from trainer.schedule import learning_rate
from trainer.targets import Captured, Row


class Ours:
    """As `trainer.train.fit` trains: the loss is a sum, and gradients are divided by the weight of the step."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._settings = load(flags=flags(order))
        torch.manual_seed(order.seed)
        target = targets.load(self._settings, order.layers, torch.device("cpu"))
        self.algorithm = algorithms.build(algorithms.configure(self._settings, target), target)
        self.vocab_size = len(target.embedding)
        self._weights = [weight for weight in self.algorithm.drafter.parameters() if weight.requires_grad]
        self._optimizer = optimizers.make(self._settings.trainer, self.algorithm.drafter)
        self._done = 0

    def pack(self, examples: list[Example]) -> list[Captured]:
        return [Captured(Row(str(one.number), one.ids, one.mask, one.epoch), one.hidden, one.last) for one in examples]

    def step(self, batch: list[Captured]) -> float:
        knobs = self._settings.trainer
        if self._order.algorithm == "dflash":  # as many blocks in every step, everywhere equally likely
            places = sum(int((row.mask[:-1] & row.mask[1:]).sum()) for row in (one.row for one in batch))
            share = min(1.0, self._order.anchors / max(places, 1))
            self.algorithm.config = replace(self.algorithm.config, anchor_share=share)
        loss = self.algorithm.loss(self.algorithm.collate(batch))
        loss.total.backward()
        for weight in self._weights:
            if weight.grad is not None:
                weight.grad.div_(loss.weight or 1)
        clip_grad_norm_(self._weights, knobs.clip)
        rate = learning_rate(
            self._done, peak=knobs.lr, max_steps=knobs.max_steps, warmup=knobs.warmup, shape=knobs.schedule
        )
        optimizers.set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._done += 1
        return float(loss.total.detach()) / (loss.weight or 1)

    def save(self, folder: Path) -> None:
        """A run whose drafter is at this step, with its export in the form that both engines read."""
        settings = self._settings.model_copy(
            update={"storage": self._settings.storage.model_copy(update={"url": str(folder)})}
        )
        run = Run.create(open_storage(settings.storage), settings.run, {}, {})
        checkpoint.write(
            run.drafter_dir(settings.trainer.drafter),
            config=self.algorithm.config,
            tensors=dict(self.algorithm.drafter.state_dict()),
            state=State(step=self._done),
            optimizer={},
            journal=Journal(),
            keep=1,
        )
        exported = export(settings, ["vllm"])["vllm"]
        (folder / "served").symlink_to(exported.relative_to(folder))


def flags(order: Order) -> dict[str, Any]:
    """The settings of one training: what the race prescribes, and above that the recipe."""
    return {
        "run": "race",
        "target.path": order.target,
        "trainer.algorithm": order.algorithm,
        "trainer.layers": order.layers,
        "trainer.ttt_steps": order.ttt_steps,
        "trainer.max_steps": order.steps,
        "trainer.batch_tokens": order.batch_tokens,
        "trainer.dtype": "float32",
        "trainer.device": "cpu",
        "trainer.seed": order.seed,
        "dflash.num_layers": order.num_layers,
        "dflash.block_size": order.block_size,
        "export.dtype": "float32",
        **order.recipe,
    }


def settings_of(order: Order) -> Settings:
    return load(flags=flags(order))


if __name__ == "__main__":
    given = read_order()
    serve(given, Ours(given))
