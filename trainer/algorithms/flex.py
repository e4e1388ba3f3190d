"""Attention by PyTorch's flex attention: a kernel for GPUs that passes over what no query of a tile sees.

What a query sees is said in stretches: of one group of keys, those from one position to another. From the least and the
largest group and position of each tile of 128 follows which pairs of tiles are seen in part, whole, or not at all; the
kernel looks at single keys only where it is in part. So there is no mask of queries x keys, only one of tiles x tiles.

    EAGLE-3   step 0 of its own row, up to itself. The one key that a query sees of each later step needs no mask: its
              score is a dot product, joined to the rest by the logarithm of the sum of exponents (`attend_unrolled`)
    DFlash    of the context of its row what lies before its anchor and in its window; of its block all, or up to itself

Of a CPU the kernel asks too much: it has no backward pass there. `written_out` stands in for it, with all scores at
once; tests hold it, and what goes through it, against the eager forms.
"""

# Q queries, P keys, h query heads, n key-value heads, g = h / n, d head size, S draft steps

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

TILE = 128
"""Queries, and keys, of a tile. The kernel's own default: its blocks divide it on every GPU."""

LEAST_CAPABILITY = (8, 0)
"""Of a GPU for the kernel: bfloat16 in its matrix units, and shared memory for its tiles."""
LEAST_HEAD_DIM = 16


class Places(NamedTuple):
    """Where keys are. Each (P,) int32."""

    group: Tensor
    position: Tensor


class Stretch(NamedTuple):
    """What each query sees of one group, both ends included. Each (Q,) int32."""

    group: Tensor
    first: Tensor
    last: Tensor


def unusable(device: torch.device, head_dim: int) -> str | None:
    """Why the kernel cannot serve a drafter of such heads on this device; None if it may."""
    if not hasattr(torch_flex, "AuxRequest"):
        return f"it needs torch 2.9 or newer, here is {torch.__version__}"
    if head_dim < LEAST_HEAD_DIM:
        return f"it needs heads of {LEAST_HEAD_DIM} or more, the drafter's have {head_dim}"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        return f"it needs a GPU of compute capability 8.0 or more, {device} has {found[0]}.{found[1]}"
    return None


def block_mask(stretches: Sequence[Stretch], keys: Places) -> BlockMask:
    """Of queries that see every key of each of their stretches. Waits for no device."""
    num_queries, num_keys = len(stretches[0].group), len(keys.group)
    group, position = _bounds(keys.group), _bounds(keys.position)  # of each tile: ((1, P/128), (1, P/128))
    some = whole = torch.zeros((), dtype=torch.bool, device=keys.group.device)
    for stretch in stretches:
        own, first, last = (tuple(bound.mT for bound in _bounds(part)) for part in stretch)  # ((Q/128, 1), (Q/128, 1))
        meets = (group[0] <= own[1]) & (group[1] >= own[0]) & (position[1] >= first[0]) & (position[0] <= last[1])
        is_one = (group[0] == group[1]) & (own[0] == own[1]) & (group[0] == own[0])
        some = some | meets
        whole = whole | (is_one & (position[0] >= first[1]) & (position[1] <= last[0]))
    # The kernel asks at single keys where a tile goes beyond the last one.
    if num_queries % TILE:
        whole[-1] = False
    if num_keys % TILE:
        whole[:, -1] = False
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=TILE,
        mask_mod=torch_flex.or_masks(*(_sees(stretch, keys) for stretch in stretches)),
        seq_lengths=(num_queries, num_keys),
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """query (Q, h, d), key and value (P, n, d) -> (Q, h, d), and the log of the sum of exponents of scores (Q, h)."""
    parts = (part.to(value.dtype).transpose(0, 1)[None] for part in (query, key, value))
    out, lse = _kernel(query.device.type)(*parts, mask)
    return out[0].transpose(0, 1), lse[0].mT


def attend_unrolled(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: BlockMask) -> Tensor:
    """Attention of one draft step of EAGLE-3, as `trainer.algorithms.layers.attend`. Returns (Q, h*d).

    The mask is that of step 0, keys[0] and values[0] (P, n, d). Each further entry (Q, n, d) is a later step's: a query
    sees the one at its own index.
    """
    out, lse = attend(query, keys[0], values[0], mask)
    if len(keys) == 1:
        return out.flatten(1)
    group = query.shape[1] // keys[0].shape[1]
    scaled = query * query.shape[-1] ** -0.5
    own = [(scaled * key.repeat_interleave(group, dim=1)).sum(-1) for key in keys[1:]]
    weights = torch.stack([lse.float(), *own], dim=-1).softmax(-1).to(out.dtype)  # (Q, h, S)
    out = weights[..., :1] * out
    for step, value in enumerate(values[1:], 1):
        out = out + weights[..., step, None] * value.repeat_interleave(group, dim=1)
    return out.flatten(1)


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """What the kernel computes, with every score at once: query (1, h, Q, d), key and value (1, n, P, d).

    Tile by tile as the kernel takes them: a tile that is listed as whole is not asked about its keys.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    nothing, of_query, of_key = (torch.arange(size, device=query.device) for size in (1, num_queries, num_keys))
    asked = mask.mask_mod(nothing[0], nothing[0], of_query[:, None], of_key)
    seen = (_spread(mask.kv_num_blocks, mask.kv_indices)[:num_queries, :num_keys] & asked) | _spread(
        mask.full_kv_num_blocks, mask.full_kv_indices
    )[:num_queries, :num_keys]
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, dim=1).mT * query.shape[-1] ** -0.5
    scores = scores.float().masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(value.dtype)
    return weights @ value.repeat_interleave(group, dim=1), lse


def call(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """flex_attention with the log of the sum of exponents, in the shapes of `written_out`."""
    out, aux = torch_flex.flex_attention(
        query, key, value, block_mask=mask, enable_gqa=True, return_aux=torch_flex.AuxRequest(lse=True)
    )
    assert aux.lse is not None
    return out, aux.lse


@cache
def _kernel(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compiled once for all lengths: everything that changes from batch to batch is a tensor or a length of one."""
    return torch.compile(call, dynamic=True, fullgraph=True) if device_type == "cuda" else written_out


def _sees(stretch: Stretch, keys: Places) -> Callable[..., Tensor]:
    """It closes over tensors alone: the kernel takes no number that changes from call to call."""
    group, first, last = stretch
    key_group, key_position = keys

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = key_position[key]
        return (key_group[key] == group[query]) & (position >= first[query]) & (position <= last[query])

    return sees


def _bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest of each tile: (P,) -> each (1, P/128)"""
    missing = -len(values) % TILE
    tiles = torch.cat((values, values[-1:].expand(missing))).view(1, -1, TILE)
    return tiles.amin(-1), tiles.amax(-1)


def _listed(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of tiles (Q/128, P/128) as the kernel has them: how many tiles of keys each of queries has, and which."""
    order = pairs.int().argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _spread(counts: Tensor, tiles: Tensor) -> Tensor:
    """The reverse of `_listed`, for single queries and keys."""
    is_listed = torch.arange(tiles.shape[-1], device=tiles.device) < counts[0, 0, :, None]
    pairs: Any = torch.zeros_like(is_listed).scatter(1, tiles[0, 0].long(), is_listed)
    return pairs.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
