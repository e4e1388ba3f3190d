"""The network: layers whose queries are those of blocks, and whose keys are the target's states and the block's.

The states of the context pass `fc` and `hidden_norm` once, for all layers; each layer makes keys and values of them
with the projections that it uses for the block. The states of the context are never updated.

A block holds the anchor's embedding and then that of the mask token, so the blocks of a batch enter the first layer
with N + 1 different vectors. It projects those, and spreads the results over the N * B slots.
"""

# N blocks, B slots of a block, P context positions of all rows, H hidden size, K chosen layers, D that of the target
# h query heads, n key-value heads, d head size

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.algorithms.dflash.attention import Chunk, attend
from trainer.algorithms.layers import RMSNorm, Rotary, SwiGLU, rotate
from trainer.drafter import DrafterConfig

Chunks = Callable[[int | None], Sequence[Chunk]]
"""The cut of the blocks for layers with this sliding window."""


class BlockAttention(nn.Module):
    """Projections, with a norm for the queries and the keys of each head, as in Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size = config.head_dim
        self.size = size
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def query(self, x: Tensor) -> Tensor:
        """(.., H) -> (.., h, d), not turned yet"""
        return self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.size)))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(.., H) -> key, not turned yet, and value, each (.., n, d)"""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.size)))
        return key, self.v_proj(x).unflatten(-1, (-1, self.size))


class DecoderLayer(nn.Module):
    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)
        self.window = window(config, index)
        self.causal = is_causal(config, index)

    def context(self, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the context: (P, H) -> each (P, n, d)"""
        key, value = self.self_attn.key_value(states)
        return rotate(key, cos, sin), value


class Drafter(nn.Module):
    """The trained weights, named as every engine names them. Embedding and head are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        fused = len(config.layers) * config.target_hidden_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary = Rotary(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def context(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context in each layer: hidden (P, K*D), positions (P,) -> each (P, n, d)"""
        states = self.hidden_norm(self.fc(hidden.to(self.dtype)))
        cos, sin = self._rotary.tables(positions)
        return [layer.context(states, cos, sin) for layer in self._layers()]

    def forward(
        self,
        context: list[tuple[Tensor, Tensor]],
        embedded: Tensor,
        positions: Tensor,
        chunks: Chunks,
    ) -> Tensor:
        """What the slots after the anchor put out, normed for the head: (N, B - 1, H).

        embedded (N + 1, H): the embeddings of the mask token and of each anchor. positions (N, B): those of the slots.
        """
        num_blocks, num_slots = positions.shape
        cos, sin = (table.unflatten(0, (num_blocks, num_slots)) for table in self._rotary.tables(positions.flatten()))
        layers = self._layers()
        cuts = {layer.window: chunks(layer.window) for layer in layers}

        def spread(x: Tensor) -> Tensor:
            """(N + 1, ..) -> (N, B, ..)"""
            masks = x[:1, None].expand(num_blocks, num_slots - 1, *x.shape[1:])
            return torch.cat((x[1:, None], masks), dim=1)

        hidden = embedded.to(self.dtype)
        for index, layer in enumerate(layers):
            attention = layer.self_attn
            x = layer.input_layernorm(hidden)
            query, (key, value) = attention.query(x), attention.key_value(x)
            if index == 0:
                query, key, value, hidden = spread(query), spread(key), spread(value), spread(hidden)
            if index == len(layers) - 1:  # nothing is read off the anchor's slot
                query, hidden = query[:, 1:], hidden[:, 1:]
            first = num_slots - query.shape[1]
            attended = attend(
                rotate(query, cos[:, first:], sin[:, first:]),
                context[index],
                (rotate(key, cos, sin), value),
                cuts[layer.window],
                causal=layer.causal,
            )
            hidden = hidden + attention.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def window(config: DrafterConfig, index: int) -> int | None:
    """How many positions a slot of this layer sees, its own included; None: all."""
    types = config.layer_types
    return config.sliding_window if types and types[index] == "sliding_attention" else None


def is_causal(config: DrafterConfig, index: int) -> bool:
    """Whether a slot sees only the slots before it. As engines decide it: what is set; else in sliding layers alone."""
    return config.causal if config.causal is not None else window(config, index) is not None
