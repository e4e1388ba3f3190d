"""DFlash against a slow oracle that is written from the definition: one anchor, one dense mask at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftfleet.settings import load
from trainer import algorithms
from trainer.algorithms.dflash import attention
from trainer.algorithms.dflash import loss as losses
from trainer.algorithms.dflash.algorithm import DFlash
from trainer.targets import Captured, Row
from trainer.targets.hf import HfTarget

VOCAB, MASK = 97, 96


@pytest.fixture(scope="module")
def target() -> HfTarget:
    """A random Llama with grouped queries, whose head is not its embedding."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return HfTarget(LlamaForCausalLM(config).eval().requires_grad_(False), [1, 4, 6], "random llama")


def dflash(target: HfTarget, **knobs: Any) -> DFlash:
    """A drafter whose every weight is random, the norms included."""
    chosen = {"num_layers": 3, "block_size": 5, "mask_token_id": MASK} | knobs
    flags = {"trainer.algorithm": "dflash", **{f"dflash.{name}": value for name, value in chosen.items()}}
    settings = load(flags=flags)
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    assert isinstance(algorithm, DFlash)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in algorithm.drafter.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return algorithm


def row(length: int, *generated: range, seed: int = 0) -> Row:
    mask = torch.zeros(length, dtype=torch.bool)
    for span in generated:
        mask[list(span)] = True
    generator = torch.Generator().manual_seed(seed + length)
    return Row(f"row-{length}", torch.randint(0, MASK, (length,), generator=generator), mask)


ROWS = [row(9, range(4, 9)), row(31, range(7, 15), range(20, 30)), row(14, range(12, 14)), row(22, range(22))]

KINDS = {
    "full": {},
    "mixed": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7},
    "sliding, not causal": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 3, "causal": False},
    "full, causal": {"causal": True},
}


def capture(target: HfTarget, rows: list[Row]) -> list[Captured]:
    return next(target.capture([rows]))


# The oracle. Shapes: T tokens of one row, a the anchor.


def oracle_states(algorithm: DFlash, ids: Tensor, hidden: Tensor, anchor: int, slots: int) -> Tensor:
    """What each slot of one block puts out, (slots, H), from keys laid end to end and an explicit mask."""
    config, drafter = algorithm.config, algorithm.drafter
    weights = dict(drafter.named_parameters())
    embedding = algorithm._target.embedding
    context = norm(drafter.hidden_norm, hidden @ weights["fc.weight"].T)
    x = embedding[[int(ids[anchor])] + [config.mask_token_id] * (slots - 1)]
    length = len(ids)
    block_positions = torch.arange(anchor, anchor + slots)
    key_positions = torch.cat((torch.arange(length), block_positions))
    for index in range(config.num_layers):
        layer: Any = drafter.layers[index]

        def heads(name: str, x: Tensor, index: int = index) -> Tensor:
            projected = x @ weights[f"layers.{index}.self_attn.{name}_proj.weight"].T
            return projected.view(len(x), -1, config.head_dim)

        y = norm(layer.input_layernorm, x)
        both = torch.cat((context, y))
        query = turn(norm(layer.self_attn.q_norm, heads("q", y)), block_positions, config)
        key = turn(norm(layer.self_attn.k_norm, heads("k", both)), key_positions, config)
        value = heads("v", both)
        group = config.num_attention_heads // config.num_key_value_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)

        sliding = bool(config.layer_types) and config.layer_types[index] == "sliding_attention"
        causal = config.causal if config.causal is not None else sliding
        seen = torch.zeros(slots, length + slots, dtype=torch.bool)
        for slot in range(slots):
            for position in range(anchor):
                near = anchor + slot - position < (config.sliding_window or 0)
                seen[slot, position] = near if sliding else True
            for other in range(slots):
                seen[slot, length + other] = other <= slot or not causal
        scores = torch.einsum("qhd,khd->hqk", query, key) / config.head_dim**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)
        x = x + attended.reshape(slots, -1) @ weights[f"layers.{index}.self_attn.o_proj.weight"].T
        inner = norm(layer.post_attention_layernorm, x)
        gate, up, down = (weights[f"layers.{index}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        x = x + (F.silu(inner @ gate) * (inner @ up)) @ down
    return norm(drafter.norm, x)


def norm(module: Any, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + module.eps).sqrt() * module.weight


def turn(x: Tensor, positions: Tensor, config: Any) -> Tensor:
    half = config.head_dim // 2
    angle = positions[:, None] * config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def oracle_loss(algorithm: DFlash, target: HfTarget, rows: list[Row]) -> tuple[Tensor, float, dict[str, float]]:
    config = algorithm.config
    last = config.block_size - 1
    total, weight = torch.zeros(()), 0.0
    metrics = {f"{name}_{k}": 0.0 for name in ("loss", "accuracy", "acceptance", "count") for k in range(last)}
    for one in rows:
        hidden = capture(target, [one])[0].hidden
        for anchor in range(len(one.ids) - 1):
            if not (one.mask[anchor] and one.mask[anchor + 1]):
                continue
            logits = oracle_states(algorithm, one.ids, hidden, anchor, config.block_size) @ target.head.T
            probability, crosses, right = [], [], True
            for slot in range(1, config.block_size):
                if anchor + slot >= len(one.ids) or not one.mask[anchor + slot]:
                    break
                label = int(one.ids[anchor + slot])
                crosses.append(-logits[slot].log_softmax(-1)[label])
                probability.append(float(torch.exp(-crosses[-1].detach())))
                right = right and int(logits[slot].argmax()) == label
                for name, value in (
                    ("loss", float(crosses[-1].detach())),
                    ("accuracy", float(logits[slot].argmax() == label)),
                    ("acceptance", float(right)),
                    ("count", 1.0),
                ):
                    metrics[f"{name}_{slot - 1}"] += value
            for slot, cross in enumerate(crosses):
                w = weight_of(slot, probability, config)
                total, weight = total + w * cross, weight + w
    return total, weight, metrics


def weight_of(slot: int, probability: list[float], config: Any) -> float:
    """`slot` counts from 0."""
    if config.slot_weights == "decay":
        return float(torch.exp(torch.tensor(-slot / config.slot_decay)))
    smooth = [(1 - config.dpace_alpha) * p + config.dpace_alpha for p in probability]
    return sum(float(torch.tensor(smooth[: m + 1]).prod()) for m in range(slot, len(smooth)))


def gradients(algorithm: DFlash, total: Tensor) -> dict[str, Tensor]:
    algorithm.drafter.zero_grad()
    total.backward()
    weights = algorithm.drafter.named_parameters()
    return {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}


def assert_close(ours: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    """Relative to the largest entry: float32 sums in another order differ by this much."""
    assert (ours - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("knobs", [*KINDS.values(), {"weights": "dpace"}], ids=[*KINDS, "dpace"])
@pytest.mark.parametrize("elements", [2**18, 600], ids=["one chunk", "many chunks"])
def test_loss_metrics_and_gradients_equal_those_of_the_dense_oracle(
    target: HfTarget, knobs: dict[str, Any], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention.CHUNK_ELEMENTS, "cpu", elements)
    monkeypatch.setitem(losses.SLICE_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(losses, "FEWEST_TOKENS", 8)
    algorithm = dflash(target, **knobs)

    layout = algorithm.collate(capture(target, ROWS))
    assert layout is not None
    loss = algorithm.loss(layout)
    ours = gradients(algorithm, loss.total)

    expected, weight, metrics = oracle_loss(algorithm, target, ROWS)
    assert (len(layout.chunks(None)) > len(ROWS)) == (elements == 600)
    assert loss.num_tokens == 4 + 7 + 9 + 1 + 21
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.weight == pytest.approx(weight, rel=1e-5)
    assert {name: value.item() for name, value in loss.metrics.items()} == pytest.approx(metrics, rel=1e-4)
    oracle = gradients(algorithm, expected)
    assert ours.keys() == oracle.keys() == dict(algorithm.drafter.named_parameters()).keys()
    for name, gradient in ours.items():
        assert_close(gradient, oracle[name], relative=1e-4)
