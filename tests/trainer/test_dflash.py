"""DFlash against a slow oracle that is written from the definition: one anchor, one dense mask at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftfleet.errors import SettingsError, TrainingError
from draftfleet.settings import load
from trainer import algorithms
from trainer.algorithms.dflash import attention, default_layers
from trainer.algorithms.dflash import loss as losses
from trainer.algorithms.dflash.algorithm import DFlash
from trainer.algorithms.dflash.anchors import draw
from trainer.algorithms.dflash.attention import Eager
from trainer.algorithms.dflash.model import is_causal, window
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
    chosen = {"weights": "decay", "num_layers": 3, "block_size": 5, "mask_token_id": MASK} | knobs
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

LOSSES = {
    "dpace": {"weights": "dpace"},
    "soft": {"labels": "soft"},
    "soft dpace": {"labels": "soft", "weights": "dpace"},
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
        z = target.logits(capture(target, [one])[0].last)
        for anchor in range(len(one.ids) - 1):
            if not (one.mask[anchor] and one.mask[anchor + 1]):
                continue
            logits = oracle_states(algorithm, one.ids, hidden, anchor, config.block_size) @ target.head.T
            probability, crosses, right = [], [], True
            for slot in range(1, config.block_size):
                if anchor + slot >= len(one.ids) or not one.mask[anchor + slot]:
                    break
                label = int(one.ids[anchor + slot])
                log_q = logits[slot].log_softmax(-1)
                p = z[anchor + slot - 1].softmax(-1) if config.soft_labels else F.one_hot(torch.tensor(label), VOCAB)
                crosses.append(-(p * log_q).sum())
                probability.append(float(log_q[label].detach().exp()))
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


@pytest.mark.parametrize("knobs", [*KINDS.values(), *LOSSES.values()], ids=[*KINDS, *LOSSES])
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


def test_layout_of_a_worked_example(target: HfTarget) -> None:
    """Prompt x0..x2, answer x3..x6, blocks of 4, as in docs/dflash.md."""
    algorithm = dflash(target, block_size=4)
    one = row(7, range(3, 7))
    x = one.ids.tolist()

    layout = algorithm.collate(capture(target, [one]))

    assert layout is not None
    assert layout.anchor_ids.tolist() == x[3:6]
    assert layout.positions.tolist() == [[3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]]
    assert layout.is_label.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    labels = layout.labels[layout.is_label].tolist()
    assert labels == [x[4], x[5], x[6], x[5], x[6], x[6]]  # slot k of anchor a: x(a + k), no shift
    assert layout.context_positions.tolist() == [0, 1, 2, 3, 4]  # nothing sees x5's state or those after it


def states(algorithm: DFlash, captured: Captured, anchor: int) -> Tensor:
    """What the slots of one block put out, by the code that trains."""
    alone = torch.zeros_like(captured.row.mask)
    alone[anchor : anchor + 2] = True
    layout = algorithm.collate([replace(captured, row=replace(captured.row, mask=alone))])
    assert layout is not None
    assert layout.positions[:, 0].tolist() == [anchor]
    drafter = algorithm.drafter
    context = drafter.context(layout.hidden, layout.context_positions)
    return drafter(context, algorithm.embed(layout.anchor_ids), layout.positions, Eager(layout.chunks))[0]


@pytest.mark.parametrize("knobs", KINDS.values(), ids=KINDS)
def test_a_block_sees_nothing_of_the_tokens_after_its_anchor_nor_of_states_from_it_on(
    target: HfTarget, knobs: dict[str, Any]
) -> None:
    algorithm, anchor = dflash(target, **knobs), 12
    captured = capture(target, [row(25, range(5, 25))])[0]
    before = states(algorithm, captured, anchor)

    after = captured.row.ids.clone()
    after[anchor + 1 :] = (after[anchor + 1 :] + 1) % MASK
    hidden = captured.hidden.clone()
    hidden[anchor:] = 1e3
    changed = states(algorithm, Captured(replace(captured.row, ids=after), hidden, captured.last), anchor)
    hidden = captured.hidden.clone()
    hidden[anchor - 1] += 1
    nearer = states(algorithm, replace(captured, hidden=hidden), anchor)
    after = captured.row.ids.clone()
    after[anchor] += 1
    other = states(algorithm, replace(captured, row=replace(captured.row, ids=after)), anchor)

    assert torch.equal(changed, before)
    assert not torch.allclose(nearer, before, atol=1e-3)
    assert not torch.allclose(other, before, atol=1e-3)


def test_rows_side_by_side_see_nothing_of_each_other_and_weigh_as_they_do_alone(target: HfTarget) -> None:
    algorithm = dflash(target)

    together = algorithm.loss(algorithm.collate(capture(target, ROWS)))
    alone = [algorithm.loss(algorithm.collate(capture(target, [one]))) for one in ROWS]

    assert together.num_tokens == sum(loss.num_tokens for loss in alone)
    assert together.weight == pytest.approx(sum(loss.weight for loss in alone), rel=1e-6)
    assert together.total.item() == pytest.approx(sum(loss.total.item() for loss in alone), rel=1e-5)


def test_each_row_draws_its_own_anchors_anew_in_each_epoch_and_the_same_ones_again(target: HfTarget) -> None:
    algorithm = dflash(target, anchors=6)
    long, short = row(80, range(10, 50), range(60, 75)), row(9, range(4, 9))
    possible = {*range(10, 49), *range(60, 74)}

    def drawn(*rows: Row) -> list[list[int]]:
        layout = algorithm.collate(capture(target, list(rows)))
        assert layout is not None
        return [anchors.tolist() for anchors in layout.anchors]

    first = drawn(long, short)
    epochs = [draw(replace(long, epoch=epoch), 6, seed=0).tolist() for epoch in range(200)]
    assert first[1] == [4, 5, 6, 7]  # all of a short row, however long its neighbour
    assert first == drawn(long, short) == [*drawn(long), *drawn(short)]
    assert all(len(set(anchors)) == 6 and anchors == sorted(anchors) for anchors in epochs)
    assert {anchor for anchors in epochs for anchor in anchors} == possible
    assert len({tuple(anchors) for anchors in epochs}) == 200
    assert draw(long, 6, seed=1).tolist() != draw(long, 6, seed=0).tolist()
    assert draw(replace(long, key="another"), 6, seed=0).tolist() != draw(long, 6, seed=0).tolist()


def test_a_row_draws_its_share_of_anchors_one_at_least_and_never_more_than_the_most() -> None:
    long, short = row(80, range(10, 51)), row(9, range(4, 9))  # 40 places and 4

    counts = [
        [len(draw(one, most, seed=0, share=share)) for one in (long, short)]
        for most, share in ((512, 0.25), (512, 0.01), (6, 0.25), (512, 1.0))
    ]

    assert counts == [[10, 1], [1, 1], [6, 1], [40, 4]]


def test_rows_without_an_anchor_give_no_loss_and_gradients_of_zero(target: HfTarget) -> None:
    algorithm = dflash(target)
    nothing = [row(8), row(9, range(8, 9))]

    alone = algorithm.loss(algorithm.collate(capture(target, nothing)))
    mixed = algorithm.loss(algorithm.collate(capture(target, [nothing[0], ROWS[0], nothing[1]])))

    assert (alone.num_tokens, alone.weight, alone.total.item()) == (0, 0, 0)
    zeros = gradients(algorithm, alone.total)
    assert zeros.keys() == dict(algorithm.drafter.named_parameters()).keys()
    assert all(not gradient.any() for gradient in zeros.values())
    only = algorithm.loss(algorithm.collate(capture(target, [ROWS[0]])))
    assert mixed.metrics.keys() == alone.metrics.keys() == only.metrics.keys()
    assert mixed.total.item() == pytest.approx(only.total.item(), rel=1e-5)


def test_weights_of_a_worked_example() -> None:
    there = torch.tensor([[True, True, True], [True, True, False]])
    probability = torch.tensor([[0.5, 0.0, 1.0], [1.0, 0.5, 0.0]])

    decayed = losses.decay(2.0)(probability, there)
    paced = losses.dpace(0.5)(probability, there)

    assert decayed[0].tolist() == pytest.approx([1, 0.60653, 0.36788], abs=1e-5)
    assert decayed[1].tolist() == pytest.approx([1, 0.60653, 0], abs=1e-5)
    # q = 0.75, 0.5, 1: the draft reaches 0.75, 0.375, 0.375; a slot weighs what is reached from it on.
    assert paced[0].tolist() == pytest.approx([1.5, 0.75, 0.375])
    assert paced[1].tolist() == pytest.approx([1.75, 0.75, 0])
    assert [losses.gamma_for(size) for size in (8, 10, 16)] == [4, 5, 7]


def test_metrics_count_likeliest_labels_and_drafts_that_were_right_up_to_a_slot() -> None:
    head = torch.eye(4) * 9
    states = head[torch.tensor([[1, 2, 3], [1, 0, 3], [2, 2, 2]])]
    labels = torch.tensor([[1, 2, 3], [1, 2, 3], [2, 2, 0]])
    there = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])

    _, sums = losses.block_cross_entropy(states, head, labels, there, losses.decay(4.0))

    assert sums.by_slot[1:].tolist() == [[3, 2, 2], [3, 2, 1], [3, 3, 2]]


def test_the_logits_of_a_slice_stay_below_the_size_that_is_stated(
    target: HfTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = dflash(target)
    layout = algorithm.collate(capture(target, [row(300, range(20, 300))]))
    sizes: list[int] = []
    slice_of = losses._slice

    def spy(state: Tensor, head: Tensor, label: Tensor, target: Tensor | None) -> Any:
        sizes.append(len(state) * len(head))
        return slice_of(state, head, label, target)

    monkeypatch.setattr(losses, "_slice", spy)
    monkeypatch.setitem(losses.SLICE_ELEMENTS, "cpu", 100 * VOCAB)
    loss = algorithm.loss(layout)

    assert max(sizes) <= 100 * VOCAB
    assert sum(sizes) == sum(int(loss.metrics[f"count_{slot}"]) for slot in range(4)) * VOCAB


def test_bfloat16_comes_near_float32(target: HfTarget) -> None:
    algorithm = dflash(target)
    layout = algorithm.collate(capture(target, ROWS))

    exact = algorithm.loss(layout)
    with torch.autocast("cpu", torch.bfloat16):
        rough = algorithm.loss(layout)

    # bfloat16 keeps 8 bits: 0.4 % for each rounding.
    assert rough.total.item() == pytest.approx(exact.total.item(), rel=2e-2)
    gradient, expected = gradients(algorithm, rough.total)["fc.weight"], gradients(algorithm, exact.total)["fc.weight"]
    assert F.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.99
    assert rough.total.item() != exact.total.item()


def test_tensors_have_the_names_and_shapes_that_engines_read(target: HfTarget) -> None:
    algorithm = dflash(target, num_layers=1)

    shapes = {name: tuple(tensor.shape) for name, tensor in algorithm.drafter.state_dict().items()}

    assert shapes == {
        "fc.weight": (64, 3 * 64),
        "hidden_norm.weight": (64,),
        "norm.weight": (64,),
        "layers.0.self_attn.q_proj.weight": (4 * 32, 64),
        "layers.0.self_attn.k_proj.weight": (2 * 32, 64),
        "layers.0.self_attn.v_proj.weight": (2 * 32, 64),
        "layers.0.self_attn.o_proj.weight": (64, 4 * 32),
        "layers.0.self_attn.q_norm.weight": (32,),
        "layers.0.self_attn.k_norm.weight": (32,),
        "layers.0.input_layernorm.weight": (64,),
        "layers.0.post_attention_layernorm.weight": (64,),
        "layers.0.mlp.gate_proj.weight": (96, 64),
        "layers.0.mlp.up_proj.weight": (96, 64),
        "layers.0.mlp.down_proj.weight": (64, 96),
    }


def test_sliding_layers_are_causal_and_full_ones_are_not_unless_it_is_set(target: HfTarget) -> None:
    def rules(**knobs: Any) -> list[tuple[int | None, bool]]:
        config = dflash(target, num_layers=2, sliding_window=9, **knobs).config
        return [(window(config, index), is_causal(config, index)) for index in range(2)]

    both = ["sliding_attention", "full_attention"]
    assert rules() == [(None, False), (None, False)]
    assert rules(layer_types=both) == [(9, True), (None, False)]
    assert rules(layer_types=both, causal=False) == [(9, False), (None, False)]
    assert rules(layer_types=both, causal=True) == [(9, True), (None, True)]


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"layer_types": ["full_attention"]}, "dflash.layer_types has 1 entries, dflash.num_layers is 3"),
        ({"layer_types": ["sliding_attention"] * 3}, "dflash.sliding_window is not set"),
        ({"mask_token_id": VOCAB}, "dflash.mask_token_id = 97: the target's embedding has the tokens 0 to 96"),
        ({"mask_token_id": None}, "no mask token was found"),
    ],
)
def test_settings_that_make_no_drafter_are_refused(target: HfTarget, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        dflash(target, **knobs)


def test_a_sample_with_the_mask_token_in_its_answer_is_refused_by_name(target: HfTarget) -> None:
    algorithm = dflash(target)
    ids = row(12, range(4, 12)).ids
    in_prompt, in_answer = (ids.clone() for _ in range(2))
    in_prompt[2] = in_answer[6] = MASK
    mask = row(12, range(4, 12)).mask

    assert algorithm.collate(capture(target, [Row("fine", in_prompt, mask)])) is not None
    with pytest.raises(TrainingError, match="sample the-bad-one has token 96 in its answer"):
        algorithm.collate(capture(target, [Row("fine", in_prompt, mask), Row("the-bad-one", in_answer, mask)]))


def test_default_layers_are_those_of_published_drafters() -> None:
    assert default_layers(36) == [1, 9, 17, 25, 33]
    assert default_layers(64) == [1, 16, 31, 46, 61]
    assert default_layers(8) == [1, 2, 3, 4, 5]
    assert default_layers(2) == [0, 1]
    assert default_layers(1) == [0]
