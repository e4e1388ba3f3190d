"""Rows laid out for the unrolled drafter: which positions draft, what each step takes there, and what is learnt."""

# S draft steps, Q drafting positions, P all positions, M tokens with a loss
# D hidden size of the target, K chosen layers

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trainer.algorithms.flex import Places, Stretch
from trainer.algorithms.layers import Spans
from trainer.targets import Captured


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows without padding. First the drafting positions of every row, then the positions before them of every row."""

    hidden: Tensor  # (P, K*D)
    positions: Tensor  # (P,)
    next_ids: Tensor  # (P,): the token after each position
    draft_ids: Tensor  # (S, Q): the token that each step takes at each drafting position; row 0 is next_ids[:Q]
    chosen: Tensor  # (M,): drafting positions with a loss at step 0; at step i it is the position i before
    last: Tensor  # (M, D): the target's last state where it predicts the same token
    spans: Spans

    def reach(self) -> tuple[list[Stretch], Places]:
        """What the drafting positions see of step 0: their row, up to themselves."""
        rows = torch.arange(len(self.spans.drafting))
        sizes = torch.tensor([*self.spans.drafting, *self.spans.context])
        group = torch.cat((rows, rows)).repeat_interleave(sizes).int().to(self.positions.device, non_blocking=True)
        places = Places(group, self.positions.int())
        own, position = (part[: self.draft_ids.shape[1]] for part in places)
        return [Stretch(own, torch.zeros_like(position), position)], places


def lay_out(captured: list[Captured], num_steps: int, device: torch.device) -> Layout | None:
    """None if no row has a token to learn."""
    rows = [row for one in captured if (row := _lay_out_row(one, num_steps)) is not None]
    if not rows:
        return None
    drafting = [row.draft_ids.shape[1] for row in rows]
    starts = accumulate(drafting[:-1], initial=0)
    chosen = [row.chosen + start for row, start in zip(rows, starts, strict=True)]
    return Layout(
        hidden=_answers_first([row.hidden for row in rows], rows),
        positions=_answers_first([torch.arange(len(row.hidden)) for row in rows], rows).to(device, non_blocking=True),
        next_ids=_answers_first([row.next_ids for row in rows], rows).to(device, non_blocking=True),
        draft_ids=torch.cat([row.draft_ids for row in rows], dim=1).to(device, non_blocking=True),
        chosen=torch.cat(chosen).to(device, non_blocking=True),
        last=torch.cat([row.last for row in rows]),
        spans=Spans(drafting, [row.context for row in rows]),
    )


@dataclass(frozen=True, slots=True)
class _LaidOutRow:
    hidden: Tensor
    next_ids: Tensor
    draft_ids: Tensor
    chosen: Tensor
    last: Tensor
    context: int


def _lay_out_row(captured: Captured, num_steps: int) -> _LaidOutRow | None:
    """One row of a layout; None if nothing in it can be learnt.

    Token u+1 is learnt if u and u+1 were generated: the target itself gives the first token of an answer. Step i
    learns it at position u-1-i, which must exist for every step.
    """
    ids, mask = captured.row.ids.cpu(), captured.row.mask.cpu()
    learnt = (mask[:-1] & mask[1:]).nonzero()[:, 0]
    learnt = learnt[learnt >= num_steps]
    if not len(learnt):
        return None
    context = int(learnt[0]) - num_steps
    stop = int(learnt[-1])  # positions context..stop-1 draft
    after = torch.arange(context, stop) + 1
    draft_ids = torch.stack([ids[(after + step).clamp(max=len(ids) - 1)] for step in range(num_steps)])
    return _LaidOutRow(
        hidden=captured.hidden[:stop],
        next_ids=ids[1 : stop + 1],
        draft_ids=draft_ids,
        chosen=learnt - 1 - context,
        last=captured.last[learnt.to(captured.last.device, non_blocking=True)],
        context=context,
    )


def _answers_first(parts: list[Tensor], rows: list[_LaidOutRow]) -> Tensor:
    answers = [part[row.context :] for part, row in zip(parts, rows, strict=True)]
    contexts = [part[: row.context] for part, row in zip(parts, rows, strict=True)]
    return torch.cat([*answers, *contexts])
