"""The network of EAGLE-3: its trained weights, and what one pass of them computes.

    g = fc [low ; middle ; high]                          the target's states of the chosen layers
    x = [ input_layernorm(embedding) ; hidden_norm(g) ]
    y = g + attention(x)
    a = y + SwiGLU(post_attention_layernorm(y))           takes the place of g at the next draft step
    logits = lm_head(norm(a))

Options: `input_norm` over what `fc` reads, or a norm of `fc_norm` for each layer of it; norm(a) instead of a for the
next step; hidden_norm(g) instead of g as the residual; `q_norm` and `k_norm` in the attention; a smaller `lm_head`.
"""

# H hidden size, D that of the target, K chosen layers, V vocabulary, R draft vocabulary, h heads of size d

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.algorithms.layers import Attention, RMSNorm, SwiGLU
from trainer.drafter import DrafterConfig
from trainer.targets import Target


class MidLayer(nn.Module):
    """The decoder layer. Attention reads the embedding beside the hidden state; the residual is the hidden state."""

    COMPILED = ("inputs", "outputs")

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)
        self._norm_before_residual = config.norm_before_residual

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention projects, and the residual: (.., D) and (.., H) -> (.., 2H) and (.., H)"""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return x, normed if self._norm_before_residual else hidden

    def outputs(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: (.., H) and (.., h*d) -> (.., H)"""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """The weights, named as vLLM and SGLang name them. The embedding is the target's."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width = len(config.layers) * config.target_hidden_size
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        norms = [RMSNorm(config.target_hidden_size, eps) for _ in config.layers] if config.fc_norm else None
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(config.head == "own")
        self._norm_output = config.norm_output
        self.is_reduced = config.draft_vocab_size is not None
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's states as one: (.., K*D) -> (.., H)"""
        hidden = hidden.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(hidden)

    def passed_on(self, hidden: Tensor) -> Tensor:
        """What the next draft step takes, of what the layer puts out: (.., H) -> (.., H)"""
        return self.norm(hidden) if self._norm_output else hidden

    def normed(self, passed: Tensor) -> Tensor:
        """What the head reads, of what is passed on: (.., H) -> (.., H)"""
        return passed if self._norm_output else self.norm(passed)

    def draft_ids(self) -> Tensor | None:
        """The target's ids (R,) that can be drafted, ascending; None if that is all of them."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device) if self.is_reduced else None

    def logits(self, passed: Tensor) -> Tensor:
        """Over the target's vocabulary, minus infinity for what cannot be drafted: (.., H) -> (.., V)"""
        logits = self.lm_head(self.normed(passed))
        ids = self.draft_ids()
        if ids is None:
            return logits
        everywhere = logits.new_full((*logits.shape[:-1], len(self.t2d)), -torch.inf)
        return everywhere.index_copy_(-1, ids, logits)

    @torch.no_grad()
    def take_vocabulary(self, ids: Tensor, target: Target) -> None:
        """Draft these ids (R,), ascending, from now on. The head becomes the target's rows for them."""
        assert len(ids) == len(self.d2t), f"{len(ids)} ids for a draft vocabulary of {len(self.d2t)}"
        self.d2t.copy_(ids.to(self.d2t.device) - torch.arange(len(ids), device=self.d2t.device))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True
        self.lm_head.weight.copy_(target.head[ids.to(target.head.device)])


@torch.no_grad()
def initialise(drafter: Drafter, target: Target, begins_at: float | None = None) -> None:
    """Weights that keep the size of what passes through them, 1 / sqrt(inputs), or of a given standard deviation. Norm
    and head as the target's.

    Under AdamW, on the tiny target, after 92,000 training tokens, the acceptance length at k=3 is 2.75 with these, 2.66
    with a standard deviation of 0.05 and 2.58 with 0.02 everywhere; 2.48 if the last norm starts at one as well.
    """
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=begins_at or module.in_features**-0.5)
    drafter.norm.weight.copy_(target.norm_scale)
    ids = drafter.draft_ids()
    drafter.lm_head.weight.copy_(target.head if ids is None else target.head[ids.to(target.head.device)])
