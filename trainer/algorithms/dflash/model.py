"""The network: layers whose queries are those of blocks, and whose keys are the target's states and the block's.

The states of the context pass `fc` and `hidden_norm` once, for all layers; each layer makes keys and values of them
with the projections that it uses for the block. The states of the context are never updated.

A block holds the anchor's embedding and then that of the mask token, so the blocks of a batch enter the first layer
with N + 1 different vectors. It projects those, and spreads the results over the N * B slots.
"""

# N blocks, B slots of a block, P context positions of all rows, H hidden size, K chosen layers, D that of the target
# h query heads, n key-value heads, d head size

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.algorithms.dflash.attention import Attention, KeyValue
from trainer.algorithms.execution import PLAIN, Execution
from trainer.algorithms.layers import RMSNorm, Rotary, SwiGLU, rotate
from trainer.drafter import DrafterConfig


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
    COMPILED = ("context", "before", "after")

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

    def before(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What goes into attention, not turned yet: (.., H) -> query (.., h, d), key and value (.., n, d)"""
        x = self.input_layernorm(hidden)
        return self.self_attn.query(x), *self.self_attn.key_value(x)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: (.., H) and (.., h*d) -> (.., H)"""
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


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
        self.execution: Execution = PLAIN

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def context(self, hidden: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of the context in each layer: hidden (P, K*D), positions (P,) -> each (P, n, d)"""
        states = self.hidden_norm(self.fc(hidden.to(self.dtype)))
        cos, sin = self._rotary.tables(positions)
        return [self.execution.run(layer.context, states, cos, sin) for layer in self._layers()]

    def forward(
        self,
        context: list[KeyValue],
        embedded: Tensor,
        positions: Tensor,
        attention: Attention,
    ) -> Tensor:
        """What the slots after the anchor put out, normed for the head: (N, B - 1, H).

        embedded (N + 1, H): the embeddings of the mask token and of each anchor. positions (N, B): those of the slots.
        """
        num_blocks, num_slots = positions.shape
        cos, sin = (table.unflatten(0, (num_blocks, num_slots)) for table in self._rotary.tables(positions.flatten()))
        hidden = embedded.to(self.dtype)
        for index, seen in enumerate(context):
            hidden = self.execution.run(self._pass, index, hidden, seen, cos, sin, attention)
        return self.norm(hidden)

    def _pass(  # noqa: PLR0917  # one tensor after the other
        self, index: int, hidden: Tensor, context: KeyValue, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """One layer: (N + 1, H) at the first and (N, B, H) at others -> (N, B, H), and (N, B - 1, H) at the last."""
        layers = self._layers()
        layer, num_slots = layers[index], cos.shape[1]
        query, key, value = layer.before(hidden)
        if index == 0:
            query, key, value, hidden = (_spread(part, num_slots) for part in (query, key, value, hidden))
        if index == len(layers) - 1:  # nothing is read off the anchor's slot
            query, hidden = query[:, 1:], hidden[:, 1:]
        first = num_slots - query.shape[1]
        attended = attention(
            rotate(query, cos[:, first:], sin[:, first:]),
            context,
            (rotate(key, cos, sin), value),
            window=layer.window,
            causal=layer.causal,
        )
        return layer.after(hidden, attended)

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def _spread(x: Tensor, num_slots: int) -> Tensor:
    """What was computed of the mask token and of each anchor, in their slots: (N + 1, ..) -> (N, B, ..)"""
    masks = x[:1, None].expand(len(x) - 1, num_slots - 1, *x.shape[1:])
    return torch.cat((x[1:, None], masks), dim=1)


def window(config: DrafterConfig, index: int) -> int | None:
    """How many positions a slot of this layer sees, its own included; None: all."""
    types = config.layer_types
    return config.sliding_window if types and types[index] == "sliding_attention" else None


def is_causal(config: DrafterConfig, index: int) -> bool:
    """Whether a slot sees only the slots before it. As engines decide it: what is set; else in sliding layers alone."""
    return config.causal if config.causal is not None else window(config, index) is not None
