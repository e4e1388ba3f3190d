"""Where blocks begin, and the layout of a batch.

An anchor is a token of an answer whose next token is of the answer too. Each row draws `anchor_share` of them and at
most `anchors`, anew in each epoch, from the seed, the row's key and the epoch alone: a resumed training draws what it
would have drawn, and so does a process that trains a row which another one would have trained.

    x0 x1 x2 | x3 x4 x5 x6        a prompt and its answer: x3, x4 and x5 may be anchors
    block of 4 at anchor x4:      takes x4 MASK MASK MASK at positions 4 5 6 7, and what the target thought of x0 to x3
                                  learns   x5   x6   -     slot k learns x(4+k); there is no x7
"""

# N blocks, B slots of a block, P context positions of all rows, T tokens of a row, K chosen layers, D target width

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trainer.algorithms.dflash.attention import Chunk, cut
from trainer.algorithms.flex import Places, Stretch
from trainer.targets import Captured, Row


def draw(row: Row, most: int, seed: int, share: float = 1.0) -> Tensor:
    """A share of the anchors of a row, one at least and at most `most`, ascending."""
    mask = row.mask.cpu()
    where = (mask[:-1] & mask[1:]).nonzero()[:, 0]
    most = min(most, math.ceil(share * len(where)))
    if len(where) <= most:
        return where
    name = f"{seed} {row.epoch} {row.key}".encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest())
    order = torch.randperm(len(where), generator=torch.Generator().manual_seed(number))
    return where[order[:most]].sort().values


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows side by side without padding: their context up to the last anchor of each, and their blocks."""

    hidden: Tensor  # (P, K*D)
    context_positions: Tensor  # (P,)
    anchor_ids: Tensor  # (N,)
    positions: Tensor  # (N, B)
    labels: Tensor  # (N, B - 1)
    is_label: Tensor  # (N, B - 1): false from the end of the answer on; on the CPU
    last: Tensor | None  # (N, B - 1, D): the target's last state before each label, where its distribution is learnt
    anchors: list[Tensor]  # of each row, ascending; on the CPU
    heads: int

    def chunks(self, window: int | None) -> list[Chunk]:
        """The cut of the blocks for layers with this sliding window."""
        blocks = accumulate(map(len, self.anchors[:-1]), initial=0)
        positions = accumulate((int(row[-1]) for row in self.anchors[:-1]), initial=0)
        return [
            chunk
            for row, block, position in zip(self.anchors, blocks, positions, strict=True)
            for chunk in cut(
                row, block, position,
                slots=self.positions.shape[1], heads=self.heads, window=window, device=self.positions.device,
            )
        ]  # fmt: skip

    def reach(self, window: int | None, causal: bool, num_queries: int) -> tuple[list[Stretch], Places]:
        """What the last slots of each block see: `trainer.algorithms.dflash.attention.Reach`.

        Rows are groups 0, 1, ..; blocks are those after them.
        """
        num_rows, (num_blocks, num_slots) = len(self.anchors), self.positions.shape
        rows, sizes = torch.arange(num_rows), torch.tensor([len(row) for row in self.anchors])
        lengths = torch.stack([row[-1] for row in self.anchors])
        blocks = num_rows + torch.arange(num_blocks)
        groups = torch.cat((rows.repeat_interleave(lengths), blocks.repeat_interleave(num_slots)))
        row_of, block_of, anchor = (
            part.repeat_interleave(num_queries)
            for part in (rows.repeat_interleave(sizes), blocks, torch.cat(self.anchors))
        )
        position = (torch.cat(self.anchors)[:, None] + torch.arange(num_slots)[-num_queries:]).flatten()
        nowhere = torch.zeros_like(position)
        first = nowhere if window is None else (position - window + 1)
        last = position if causal else anchor + num_slots - 1

        def there(part: Tensor) -> Tensor:
            return part.int().to(self.positions.device, non_blocking=True)

        places = Places(there(groups), torch.cat((self.context_positions, self.positions.flatten())).int())
        return [
            Stretch(there(row_of), there(first), there(anchor - 1)),
            Stretch(there(block_of), there(nowhere), there(last)),
        ], places


def lay_out(
    captured: list[Captured],
    *,
    most: int,
    seed: int,
    slots: int,
    heads: int,
    soft: bool,
    device: torch.device,
    share: float = 1.0,
) -> Layout | None:
    """None if no row has a token to learn."""
    drawn = [(one, anchors) for one in captured if len(anchors := draw(one.row, most, seed, share))]
    if not drawn:
        return None
    anchors = [where for _, where in drawn]
    labels, is_label = zip(*(_labels(one.row, where, slots) for one, where in drawn), strict=True)
    return Layout(
        hidden=torch.cat([one.hidden[: int(where[-1])] for one, where in drawn]),
        context_positions=torch.cat([torch.arange(int(where[-1])) for where in anchors]).to(device, non_blocking=True),
        anchor_ids=torch.cat([one.row.ids.cpu()[where] for one, where in drawn]).to(device, non_blocking=True),
        positions=(torch.cat(anchors)[:, None] + torch.arange(slots)).to(device, non_blocking=True),
        labels=torch.cat(labels).to(device, non_blocking=True),
        is_label=torch.cat(is_label),
        last=torch.cat([_before_labels(one, where, slots) for one, where in drawn]) if soft else None,
        anchors=anchors,
        heads=heads,
    )


def _labels(row: Row, anchors: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The tokens after each anchor, and which of them are learnt: those of the answer, up to its first gap."""
    where = anchors[:, None] + torch.arange(1, slots)
    inside = where < len(row.ids)
    where = where.clamp(max=len(row.ids) - 1)
    return row.ids.cpu()[where], (inside & row.mask.cpu()[where]).cumprod(1).bool()


def _before_labels(captured: Captured, anchors: Tensor, slots: int) -> Tensor:
    """x(a+k) is what the state at a+k-1 predicts."""
    where = (anchors[:, None] + torch.arange(slots - 1)).clamp(max=len(captured.last) - 1)
    return captured.last[where.to(captured.last.device, non_blocking=True)]
