"""DFlash as the trainer sees it: its batch layout, its loss, and how it drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from draftfleet.errors import TrainingError
from trainer.algorithms import Loss
from trainer.algorithms.dflash.anchors import Layout, lay_out
from trainer.algorithms.dflash.attention import Eager, Flex
from trainer.algorithms.dflash.loss import Soft, Sums, block_cross_entropy, decay, dpace
from trainer.algorithms.dflash.model import Drafter
from trainer.algorithms.dflash.proposer import DFlashProposer
from trainer.algorithms.execution import Execution
from trainer.drafter import DrafterConfig
from trainer.targets import Captured, Target


class DFlash:
    def __init__(self, config: DrafterConfig, target: Target) -> None:
        self.config = config
        self.drafter = Drafter(config).to(target.device)
        self._target = target
        self._seed = torch.initial_seed()
        self._weigh = dpace(config.dpace_alpha) if config.slot_weights == "dpace" else decay(config.slot_decay)

    def collate(self, captured: list[Captured]) -> Layout | None:
        """None if no row has a token to learn. Raises TrainingError if an answer holds the mask token."""
        for one in captured:
            self._refuse_mask_token(one)
        return lay_out(
            captured,
            most=self.config.anchors,
            share=self.config.anchor_share,
            seed=self._seed,
            slots=self.config.block_size,
            heads=self.config.num_attention_heads,
            soft=self.config.soft_labels,
            device=self._target.device,
        )

    def loss(self, layout: Layout | None) -> Loss:
        if layout is None:
            return self._no_loss()
        states = self.drafter(
            self.drafter.context(layout.hidden, layout.context_positions),
            self.embed(layout.anchor_ids),
            layout.positions,
            Flex(layout.reach) if self.execution.flex else Eager(layout.chunks),
        )
        soft = None if layout.last is None else Soft(layout.last, self._target.logits)
        total, sums = block_cross_entropy(states, self._target.head, layout.labels, layout.is_label, self._weigh, soft)
        return Loss(total, len(layout.anchor_ids), float(sums.weight), _metrics(sums))

    @property
    def execution(self) -> Execution:
        return self.drafter.execution

    @execution.setter
    def execution(self, value: Execution) -> None:
        self.drafter.execution = value

    def proposer(self) -> DFlashProposer:
        return DFlashProposer(self)

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings of the mask token and of these anchors: (N,) -> (N + 1, H)"""
        mask = ids.new_full((1,), self.config.mask_token_id)
        return self._target.embedding[torch.cat((mask, ids))].to(self.drafter.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """(.., H) -> (.., V) float32"""
        head = self._target.head
        return (states.to(head.dtype) @ head.T).float()

    def _no_loss(self) -> Loss:
        """Zero, with a gradient of zero for every weight."""
        zero = torch.stack([parameter.sum() for parameter in self.drafter.parameters()]).sum() * 0.0
        nothing = zero.detach().expand(4, self.config.block_size - 1)
        return Loss(zero, 0, 0.0, _metrics(Sums(zero.detach(), nothing)))

    def _refuse_mask_token(self, captured: Captured) -> None:
        """In an answer it would be an anchor like any masked slot, and a token to draft. A prompt may hold it."""
        row, mask_token_id = captured.row, self.config.mask_token_id
        if bool((row.mask & (row.ids == mask_token_id)).any()):
            raise TrainingError(
                f"sample {row.key} has token {mask_token_id} in its answer, which is the mask token of this drafter: "
                "name a token that the target never generates with dflash.mask_token_id, and begin the drafter anew "
                "under another trainer.drafter."
            )


def _metrics(sums: Sums) -> dict[str, Tensor]:
    """The first drafted token is number 0, as in every algorithm. `count_k` divides what ends with its number."""
    names = ("loss", "accuracy", "acceptance", "count")
    slots = range(sums.by_slot.shape[1])
    return {f"{name}_{slot}": sums.by_slot[n, slot] for n, name in enumerate(names) for slot in slots}
