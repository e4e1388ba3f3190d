"""The parts of a drafter's one decoder layer: norm, rotary positions, attention over two inputs, SwiGLU."""

# Q queries, P keys, H hidden size, h query heads, n key-value heads, g = h / n query heads to each of them, d head size

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trainer.drafter import DrafterConfig

QUERY_BLOCK = 512
"""Queries whose scores exist at once. Longer rows go block by block and recompute them in the backward pass, so that
the memory of attention grows with the length of a row, not with its square."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * scale)


class Rotary:
    """Rotary positions in Llama's form (halves, not pairs), with the target's own parameters and scaling."""

    def __init__(self, config: DrafterConfig) -> None:
        self._embedding: Any = LlamaRotaryEmbedding(
            LlamaConfig(
                # Of no consequence here, and refused unless a multiple: Qwen3.6-27B has 24 heads of 256, and 5,120.
                hidden_size=config.num_attention_heads * config.head_dim,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn x (Q, heads, d) by positions (Q,)."""
        cos, sin = self.tables(positions)
        return rotate(x, cos, sin)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for positions (Q,), each (Q, 1, d)."""
        self._embedding.to(positions.device)
        cos, sin = self._embedding(torch.empty(0, device=positions.device), positions[None])
        return cos[0, :, None], sin[0, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Projections of an attention whose input is the token's embedding beside the hidden state, so twice as wide.

    In Qwen3's style queries and keys are normed, head by head, before they are turned.
    """

    COMPILED = ("query", "key_value")

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, size = 2 * config.hidden_size, config.head_dim
        self.size = size
        self.q_proj = nn.Linear(width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=False)
        is_normed = config.style == "qwen3"
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if is_normed else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if is_normed else None

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (Q, 2H) -> (Q, h, d)"""
        return rotate(self._heads(self.q_proj(x), self.q_norm), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x (P, 2H) -> key and value, each (P, n, d)"""
        key = rotate(self._heads(self.k_proj(x), self.k_norm), cos, sin)
        return key, self._heads(self.v_proj(x), None)

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """(Q, h*d) -> (Q, h, d)"""
        heads = projected.unflatten(-1, (-1, self.size))
        return heads if norm is None else norm(heads).to(heads.dtype)


class SwiGLU(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True, slots=True)
class Spans:
    """How many positions each row has, of those that draft and of those before them."""

    drafting: list[int]
    context: list[int]


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor], spans: Spans) -> Tensor:
    """Attention of one draft step. Returns (Q, h*d).

    query (Q, h, d) holds the drafting positions of all rows, one row after the other. keys[0] and values[0] (P, n, d)
    are those of step 0: first the same Q positions, then the context of every row. Each further entry (Q, n, d) is a
    later step's. A query sees the context of its row, step 0 causally, and of each later step the one key at its own
    index.
    """
    num_queries, _, size = query.shape
    num_kv = keys[0].shape[1]
    query = query.unflatten(1, (num_kv, -1)) * size**-0.5  # (Q, n, g, d)
    # The keys of later steps are one for each query: dot products of all rows at once. (Q, n, g, steps)
    own_scores = [(query * key[:, :, None]).sum(-1) for key in keys[1:]]
    own = torch.stack(own_scores, -1) if own_scores else query.new_zeros(*query.shape[:3], 0)

    sizes = [*spans.drafting, *spans.context]
    rows = len(spans.drafting)
    key_parts, value_parts = keys[0].split(sizes), values[0].split(sizes)
    outs: list[Tensor] = []
    weights: list[Tensor] = []
    for row, (row_query, row_own) in enumerate(
        zip(query.split(spans.drafting), own.split(spans.drafting), strict=True)
    ):
        row_keys = torch.cat((key_parts[rows + row], key_parts[row])).permute(1, 2, 0)  # (n, d, context + Q)
        row_values = torch.cat((value_parts[rows + row], value_parts[row])).transpose(0, 1)  # (n, context + Q, d)
        context = spans.context[row]
        for start in range(0, len(row_query), QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, len(row_query))
            block = (
                row_query[start:stop],
                row_own[start:stop],
                row_keys[..., : context + stop],
                row_values[:, : context + stop],
            )
            if len(row_query) > QUERY_BLOCK and torch.is_grad_enabled():
                out, weight = checkpoint(_attend_block, *block, use_reentrant=False, preserve_rng_state=False)
            else:
                out, weight = _attend_block(*block)
            outs.append(out)
            weights.append(weight)

    out = torch.cat(outs)
    own_weights = torch.cat(weights)
    for step, value in enumerate(values[1:]):
        out = out + own_weights[..., step, None] * value[:, :, None]
    return out.reshape(num_queries, -1)


def attend_last(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one query (1, h, d) to all keys and values (P, n, d). Returns (1, h*d)."""
    query = query.unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5
    own = query.new_zeros(*query.shape[:3], 0)
    out, _ = _attend_block(query, own, keys.permute(1, 2, 0), values.transpose(0, 1))
    return out.reshape(1, -1)


def _attend_block(query: Tensor, own: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The last query sees all keys, the one before it all but the last, and so on.

    query (q, n, g, d), own scores (q, n, g, s), keys (n, d, p), values (n, p, d) -> (q, n, g, d), weights (q, n, g, s)
    """
    q, n, g, _ = query.shape
    p, s = keys.shape[-1], own.shape[-1]
    scores = query.transpose(0, 1).flatten(1, 2) @ keys  # (n, q*g, p)
    causal = scores.unflatten(1, (q, g))[..., p - q :] + _future(scores.device)[:q, None, :q].to(scores.dtype)
    joint = torch.cat((scores.unflatten(1, (q, g))[..., : p - q], causal, own.transpose(0, 1)), dim=-1)
    weights = joint.float().softmax(-1).to(values.dtype)
    out = weights[..., :p].flatten(1, 2) @ values
    return out.unflatten(1, (q, g)).transpose(0, 1), weights[..., p:].transpose(0, 1).reshape(q, n, g, s)


@cache
def _future(device: torch.device) -> Tensor:
    """Added to scores: minus infinity where the key lies after the query."""
    return torch.full((QUERY_BLOCK, QUERY_BLOCK), -torch.inf, device=device).triu(1)
