"""Attention of blocks: a query sees the context of its row before its anchor, and the slots of its own block.

Blocks of a row are sorted by their anchors and go in chunks, so the context of a chunk is a piece of the row without
gaps, and only its ragged ends need a mask. Scores of a chunk stay in the cache of a CPU. They are computed again in
the backward pass: the memory of attention grows with the length of a row and with its blocks, not with the product.

`Eager` is the form for every device; `Flex` takes its place on a GPU, and is held against it.
"""

# N blocks, Q queries of a block, B slots of a block, P context positions of all rows
# h query heads, n key-value heads, g = h / n query heads to each of them, d head size
# G blocks of a chunk, C context positions of a chunk

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.algorithms import flex

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**27}
"""Scores of a chunk, over all heads."""


class Chunk(NamedTuple):
    """Neighbouring blocks of a row and the context that any of them sees."""

    blocks: slice
    context: slice  # of the P positions
    unseen: Tensor  # (G, 1 or B, w): what a block, or a slot, may not see of the last w positions of the context


Chunks = Callable[[int | None], Sequence[Chunk]]
"""The cut of the blocks for layers with this sliding window."""

Reach = Callable[[int | None, bool, int], tuple[list[flex.Stretch], flex.Places]]
"""(sliding window, whether slots see only those before them, how many of the last slots ask) -> what they see of the
context and, behind it, of all slots."""

KeyValue = tuple[Tensor, Tensor]


class Attention(Protocol):
    """That of the blocks of one batch, in each layer."""

    def __call__(
        self, query: Tensor, context: KeyValue, block: KeyValue, *, window: int | None, causal: bool
    ) -> Tensor:
        """query (N, Q, h, d) of the last Q slots, keys and values of the context (P, n, d), of blocks (N, B, n, d).

        Returns (N, Q, h*d). `causal`: a slot sees only the slots of its block that are not after it.
        """
        ...


class Eager:
    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._cuts: dict[int | None, Sequence[Chunk]] = {}

    def __call__(
        self, query: Tensor, context: KeyValue, block: KeyValue, *, window: int | None, causal: bool
    ) -> Tensor:
        if window not in self._cuts:
            self._cuts[window] = self._chunks(window)
        return attend(query, context, block, self._cuts[window], causal=causal)


class Flex:
    """A mask is made once for all layers that see alike."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._masks: dict[tuple[int | None, bool, int], BlockMask] = {}

    def __call__(
        self, query: Tensor, context: KeyValue, block: KeyValue, *, window: int | None, causal: bool
    ) -> Tensor:
        kind = (window, causal, query.shape[1])
        if kind not in self._masks:
            self._masks[kind] = flex.block_mask(*self._reach(*kind))
        key, value = (torch.cat((seen, own.flatten(0, 1))) for seen, own in zip(context, block, strict=True))
        out, _ = flex.attend(query.flatten(0, 1), key, value, self._masks[kind])
        return out.flatten(1).unflatten(0, query.shape[:2])


def cut(
    anchors: Tensor,
    first_block: int,
    first_position: int,
    *,
    slots: int,
    heads: int,
    window: int | None,
    device: torch.device,
) -> list[Chunk]:
    """The chunks of one row, whose blocks and context begin at these places. `anchors` (N,), on the CPU, ascend."""
    where = anchors.tolist()
    size = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
    longest = min(where[-1], window + size if window else where[-1]) + slots
    step = max(1, size // (slots * heads * longest))
    chunks: list[Chunk] = []
    for start in range(0, len(where), step):
        stop = min(start + step, len(where))
        nearest, furthest = where[start], where[stop - 1]
        own = anchors[start:stop, None, None]
        if window is None:
            begin = 0
            unseen = torch.arange(nearest, furthest) >= own
        else:
            begin = max(0, nearest - window + 1)
            positions = torch.arange(begin, furthest)
            slot = torch.arange(slots)[:, None]
            unseen = (positions >= own) | (positions <= own + slot - window)
        context = slice(first_position + begin, first_position + furthest)
        blocks = slice(first_block + start, first_block + stop)
        chunks.append(Chunk(blocks, context, unseen.to(device, non_blocking=True)))
    return chunks


def attend(
    query: Tensor,
    context: KeyValue,
    block: KeyValue,
    chunks: Sequence[Chunk],
    *,
    causal: bool,
) -> Tensor:
    """As `Attention` says, chunk by chunk."""
    dtype, num_kv = block[1].dtype, block[1].shape[2]
    out = _Attend.apply(
        query.to(dtype).unflatten(2, (num_kv, -1)).permute(2, 0, 1, 3, 4).contiguous(),
        *(part.to(dtype).transpose(0, 1).contiguous() for part in context),
        *(part.to(dtype).permute(2, 0, 1, 3).contiguous() for part in block),
        chunks,
        causal,
    )
    assert isinstance(out, Tensor)
    return out.permute(1, 2, 0, 3, 4).flatten(2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # apply takes no keywords
        ctx: Any,
        query: Tensor,  # (n, N, Q, g, d)
        keys: Tensor,  # (n, P, d)
        values: Tensor,
        own_keys: Tensor,  # (n, N, B, d)
        own_values: Tensor,
        chunks: Sequence[Chunk],
        causal: bool,
    ) -> Tensor:
        out = torch.empty_like(query)
        with torch.autocast(query.device.type, enabled=False):
            for chunk in chunks:
                weights = _weights(query[:, chunk.blocks], keys, own_keys, chunk, causal)
                of_context, of_block = _split(weights, chunk)
                part = out[:, chunk.blocks]
                seen = of_context @ values[:, chunk.context]
                own = of_block @ own_values[:, chunk.blocks]
                torch.add(seen.view_as(part), own.view_as(part), out=part)
        ctx.save_for_backward(query, keys, values, own_keys, own_values, out)
        ctx.chunks, ctx.causal = chunks, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, out = ctx.saved_tensors
        grad_out = grad_outputs[0].contiguous()
        scale = query.shape[-1] ** -0.5
        grad_query = torch.empty_like(query)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        grad_own_keys, grad_own_values = torch.empty_like(own_keys), torch.empty_like(own_values)
        with torch.autocast(query.device.type, enabled=False):
            # Softmax is not moved by what moves all scores of a query alike. (n, N, Q, g, 1)
            common = (grad_out * out).sum(-1, keepdim=True)
            for chunk in ctx.chunks:
                part, where = chunk.blocks, chunk.context
                weights = _weights(query[:, part], keys, own_keys, chunk, ctx.causal)
                of_context, of_block = _split(weights, chunk)
                grad, q = grad_out[:, part].flatten(1, 3), query[:, part].flatten(1, 3)  # (n, G*Q*g, d)
                own_grad, own_q = grad_out[:, part].flatten(2, 3), query[:, part].flatten(2, 3)  # (n, G, Q*g, d)

                grad_values[:, where] += of_context.mT @ grad
                grad_own_values[:, part] = of_block.mT @ own_grad
                by_weights = (grad @ values[:, where].mT, (own_grad @ own_values[:, part].mT).flatten(1, 2))
                scores = torch.cat(by_weights, dim=-1).sub_(common[:, part].flatten(1, 3)).mul_(weights).mul_(scale)
                of_context, of_block = _split(scores, chunk)
                grad_keys[:, where] += of_context.mT @ q
                grad_own_keys[:, part] = of_block.mT @ own_q
                piece = grad_query[:, part]
                seen, own = of_context @ keys[:, where], of_block @ own_keys[:, part]
                torch.add(seen.view_as(piece), own.view_as(piece), out=piece)
        return grad_query, grad_keys, grad_values, grad_own_keys, grad_own_values, None, None


def _weights(query: Tensor, keys: Tensor, own_keys: Tensor, chunk: Chunk, causal: bool) -> Tensor:
    """Of a chunk's queries (n, G, Q, g, d) for its context and, behind it, its own slots: (n, G*Q*g, C + B)"""
    _, num_blocks, num_queries, group, size = query.shape
    num_slots = own_keys.shape[2]
    seen = query.flatten(1, 3) @ keys[:, chunk.context].mT
    own = (query.flatten(2, 3) @ own_keys[:, chunk.blocks].mT).flatten(1, 2)
    scores = torch.cat((seen, own), dim=-1).mul_(size**-0.5)

    by_slot = scores.unflatten(1, (num_blocks, num_queries, group))
    context, width = seen.shape[-1], chunk.unseen.shape[-1]
    unseen = chunk.unseen[:, -num_queries:, None]  # (G, 1 or Q, 1, w)
    by_slot[..., context - width : context].masked_fill_(unseen, -torch.inf)
    if causal:
        after = torch.ones(num_slots, num_slots, dtype=torch.bool, device=scores.device).triu(1)
        by_slot[..., context:].masked_fill_(after[-num_queries:, None], -torch.inf)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def _split(weights: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """(n, G*Q*g, C + B) -> those of the context (n, G*Q*g, C), and of blocks (n, G, Q*g, B)"""
    context = chunk.context.stop - chunk.context.start
    num_blocks = chunk.blocks.stop - chunk.blocks.start
    return weights[..., :context], weights[..., context:].unflatten(1, (num_blocks, -1))
