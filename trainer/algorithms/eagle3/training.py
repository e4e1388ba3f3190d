"""EAGLE-3 as an algorithm: the training-time test unrolled over a batch, and its loss."""

# S draft steps, Q drafting positions, P all positions, M tokens with a loss, H hidden size

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.algorithms import Loss, flex
from trainer.algorithms.eagle3.layout import Layout, lay_out
from trainer.algorithms.eagle3.model import Drafter, initialise
from trainer.algorithms.eagle3.proposer import Eagle3Proposer
from trainer.algorithms.execution import PLAIN, Execution
from trainer.algorithms.head import Objective, head_loss
from trainer.algorithms.layers import Rotary, attend
from trainer.drafter import DrafterConfig
from trainer.targets import Captured, Target


class Eagle3:
    def __init__(self, config: DrafterConfig, target: Target) -> None:
        self.config = config
        self.drafter = Drafter(config).to(target.device)
        self.rotary = Rotary(config)
        self.execution: Execution = PLAIN
        self._target = target

    def collate(self, captured: list[Captured]) -> Layout | None:
        """None if no row has a token to learn."""
        return lay_out(captured, self.config.ttt_steps, self._target.device)

    def loss(self, layout: Layout | None) -> Loss:
        """Where the loss skips a token whose best one cannot be drafted, `weight` counts the others alone."""
        if layout is None:
            return self._no_loss()
        steps = self.unroll(layout)
        states = torch.stack(
            [self.drafter.normed(passed.index_select(0, layout.chosen - step)) for step, passed in enumerate(steps)]
        )
        found = head_loss(states, self.drafter.lm_head.weight, layout.last, self._target.logits, self._objective())
        num_tokens = len(layout.chosen)
        skips = self.drafter.is_reduced and self.config.loss == "soft_ce"
        return Loss(
            found.total,
            num_tokens,
            float(found.num_inside) if skips else num_tokens,
            self._metrics(found.sums, found.num_inside),
        )

    def _objective(self) -> Objective:
        return Objective(
            [self.config.step_decay**step for step in range(self.config.ttt_steps)],
            self.config.vocab_size,
            self.config.loss,
            self.drafter.draft_ids(),
        )

    def _no_loss(self) -> Loss:
        """Zero, with a gradient of zero for every weight that is trained."""
        trained = [parameter.sum() for parameter in self.drafter.parameters() if parameter.requires_grad]
        zero = torch.stack(trained).sum() * 0.0
        nothing = zero.detach()
        return Loss(zero, 0, 0, self._metrics(nothing.expand(3, self.config.ttt_steps), nothing))

    def _metrics(self, sums: Tensor, num_inside: Tensor) -> dict[str, Tensor]:
        names = ("loss", "accuracy", "acceptance")
        metrics = {f"{name}_{step}": sums[n, step] for n, name in enumerate(names) for step in range(sums.shape[1])}
        return metrics | ({"in_vocabulary": num_inside} if self.drafter.is_reduced else {})

    def unroll(self, layout: Layout) -> list[Tensor]:
        """What each step passes on (Q, H) at the drafting positions."""
        mask = flex.block_mask(*layout.reach()) if self.execution.flex else None
        steps: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(self.config.ttt_steps):
            passed, key, value = self.execution.run(
                self._step, step, steps[-1] if steps else layout.hidden, [*keys], [*values], layout, mask
            )
            steps.append(passed)
            keys.append(key)
            values.append(value)
        return steps

    def _step(  # noqa: PLR0917  # one tensor after the other
        self,
        step: int,
        hidden: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        layout: Layout,
        mask: BlockMask | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One draft step, after those with these keys and values: what it passes on (Q, H), and its own (P or Q, n, d).

        `hidden` is what the step before passed on; at step 0 the target's states (P, K*D).
        """
        layer, attention = self.drafter.midlayer, self.drafter.midlayer.self_attn
        ids = layout.draft_ids[step] if step else layout.next_ids
        x, residual = layer.inputs(self.embed(ids), hidden if step else self.drafter.fuse(hidden))
        cos, sin = self.rotary.tables(layout.positions[: len(ids)] + step)
        key, value = attention.key_value(x, cos, sin)
        drafting = slice(layout.draft_ids.shape[1])
        query = attention.query(x[drafting], cos[drafting], sin[drafting])
        keys, values = [*keys, key], [*values, value]
        if mask is None:
            attended = attend(query, keys, values, layout.spans)
        else:
            attended = flex.attend_unrolled(query, keys, values, mask)
        return self.drafter.passed_on(layer.outputs(residual[drafting], attended)), key, value

    def embed(self, ids: Tensor) -> Tensor:
        return self._target.embedding[ids].to(self.drafter.fc.weight.dtype)

    def proposer(self) -> Eagle3Proposer:
        return Eagle3Proposer(self.drafter, self.rotary, self.embed)


def build(config: DrafterConfig, target: Target) -> Eagle3:
    """A new drafter: the last norm and the head start as the target's, everything else at random.

    A reduced vocabulary has its size and, until one is taken or loaded, the lowest ids.
    """
    algorithm = Eagle3(config, target)
    initialise(algorithm.drafter, target, config.begins_at)
    return algorithm
