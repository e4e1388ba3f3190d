"""EAGLE-3 against a slow oracle that is written from the definition: one row, one step, one dense mask at a time."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftfleet.errors import SettingsError
from draftfleet.settings import load
from trainer import algorithms, drafter
from trainer.algorithms.eagle3 import Eagle3
from trainer.algorithms.layers import QUERY_BLOCK, Rotary
from trainer.drafter import DrafterConfig
from trainer.export import native
from trainer.targets import Row
from trainer.targets.hf import HfTarget

VOCAB = 97
REDUCED = {"draft_vocab_size": 40}
NORMS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
MANY = dict.fromkeys(NORMS, True) | {"norm_before_fc": False, "style": "qwen3"}
OTHERS = {"norm_before_fc": True, "norm_output": True}
OPTIONS = [
    dict(zip(NORMS, norms, strict=True)) | style | vocabulary
    for norms in product((False, True), repeat=len(NORMS))
    if not norms[0] or not norms[1]  # refused
    for style in ({"style": "llama"}, {"style": "qwen3"})
    for vocabulary in ({}, REDUCED)
]


@pytest.fixture(scope="module")
def target() -> HfTarget:
    """A random Llama with grouped queries and a tied head, sharp enough that its argmax means something."""
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


def eagle3(target: HfTarget, *, ttt_steps: int = 3, step_decay: float = 0.8, **knobs: Any) -> Eagle3:
    """A drafter whose every weight is random, the norms included. `knobs` are those of [eagle3]."""
    flags = {"trainer.ttt_steps": ttt_steps, "trainer.step_decay": step_decay}
    settings = load(flags=flags | {f"eagle3.{name}": value for name, value in knobs.items()})
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    assert isinstance(algorithm, Eagle3)
    torch.manual_seed(2)
    if algorithm.config.draft_vocab_size:
        algorithm.drafter.take_vocabulary(torch.randperm(VOCAB)[: algorithm.config.draft_vocab_size].sort()[0], target)
    with torch.no_grad():
        for weight in algorithm.drafter.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return algorithm


def row(length: int, *generated: range, seed: int = 0) -> Row:
    mask = torch.zeros(length, dtype=torch.bool)
    for span in generated:
        mask[list(span)] = True
    generator = torch.Generator().manual_seed(seed + length)
    return Row(f"row-{length}", torch.randint(0, VOCAB, (length,), generator=generator), mask)


ROWS = [row(9, range(4, 9)), row(31, range(7, 15), range(20, 30)), row(14, range(12, 14)), row(22, range(3, 22))]


# The oracle. Shapes: T tokens of one row, N steps.


def oracle_states(algorithm: Eagle3, ids: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
    """What the layer puts out in each step at every position of a row, (T, H), from concatenated keys and an explicit
    mask."""
    weights = dict(algorithm.drafter.named_parameters())
    config, layer = algorithm.config, algorithm.drafter.midlayer
    length = len(ids)
    index = torch.arange(length)
    if config.norm_before_fc:
        hidden = norm(algorithm.drafter.input_norm, hidden)
    if config.fc_norm:
        width = config.target_hidden_size
        parts = [hidden[:, n * width : (n + 1) * width] for n in range(len(config.layers))]
        hidden = torch.cat(
            [norm(algorithm.drafter.get_submodule(f"fc_norm.{n}"), part) for n, part in enumerate(parts)], -1
        )
    passed = hidden @ weights["fc.weight"].T
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    for step in range(steps):
        tokens = F.pad(ids, (0, step + 1))[step + 1 :]
        normed = norm(layer.hidden_norm, passed)
        x = torch.cat((norm(layer.input_layernorm, algorithm.embed(tokens)), normed), -1)

        def heads(name: str, x: Tensor = x) -> Tensor:
            projected = (x @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, config.head_dim)
            is_normed = config.style == "qwen3" and name in {"q", "k"}
            return norm(layer.get_submodule(f"self_attn.{name}_norm"), projected) if is_normed else projected

        query = turn(heads("q"), index + step, config)
        keys.append(turn(heads("k"), index + step, config))
        values.append(heads("v"))
        group = config.num_attention_heads // config.num_key_value_heads
        key = torch.cat(keys).repeat_interleave(group, 1)
        value = torch.cat(values).repeat_interleave(group, 1)

        seen = torch.zeros(length, (step + 1) * length, dtype=torch.bool)
        for q in range(length):
            seen[q, : q + 1] = True
            for later in range(1, step + 1):
                seen[q, later * length + q] = True
        scores = torch.einsum("qhd,khd->hqk", query, key) / config.head_dim**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)

        state = normed if config.norm_before_residual else passed
        state = state + attended.reshape(length, -1) @ weights["midlayer.self_attn.o_proj.weight"].T
        inner = norm(layer.post_attention_layernorm, state)
        gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        state = state + (F.silu(inner @ gate) * (inner @ up)) @ down
        states.append(state)
        passed = norm(algorithm.drafter.norm, state) if config.norm_output else state
    return states


def oracle_logits(algorithm: Eagle3, state: Tensor) -> Tensor:
    """Over the target's vocabulary (V,)."""
    logits = norm(algorithm.drafter.norm, state) @ algorithm.drafter.lm_head.weight.T
    if algorithm.config.draft_vocab_size is None:
        return logits
    everywhere = [torch.tensor(-torch.inf)] * VOCAB
    for draft_id, offset in enumerate(algorithm.drafter.d2t.tolist()):
        everywhere[draft_id + offset] = logits[draft_id]
    return torch.stack(everywhere)


def token_loss(kind: str, p: Tensor, logits: Tensor) -> tuple[Tensor, bool]:
    """Of one token, p and logits over the target's vocabulary; and whether it counts."""
    can = logits > -torch.inf
    log_q, inside = logits[can].log_softmax(-1), p[can]
    renormed = inside / inside.sum()
    if kind == "soft_ce":
        counts = bool(can[p.argmax()])
        return -(renormed * log_q).sum() * counts, counts
    divergence = inside.sum() * (renormed * (renormed.log() - log_q)).sum()
    if kind == "forward_kl":
        return divergence, True
    accepted = torch.minimum(inside, log_q.exp()).sum()
    share = torch.exp(-3 * accepted.detach())
    return share * divergence + (1 - share) * (1 - accepted), True


def norm(module: Any, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + module.eps).sqrt() * module.weight


def turn(x: Tensor, positions: Tensor, config: DrafterConfig) -> Tensor:
    half = config.head_dim // 2
    angle = positions[:, None] * config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def oracle_loss(algorithm: Eagle3, target: HfTarget, rows: list[Row]) -> tuple[Tensor, float, dict[str, float]]:
    steps, decay = algorithm.config.ttt_steps, algorithm.config.step_decay
    total, weight = torch.zeros(()), 0.0
    metrics = {f"{name}_{step}": 0.0 for name in ("loss", "accuracy", "acceptance") for step in range(steps)}
    inside = 0.0
    for one in rows:
        captured = next(target.capture([[one]]))[0]
        states = oracle_states(algorithm, one.ids, captured.hidden, steps)
        z = target.logits(captured.last)
        for step, state in enumerate(states):
            for t in range(len(one.ids)):
                label = t + 2 + step
                if label >= len(one.ids) or not (one.mask[label - 1] and one.mask[label]):
                    continue
                p, logits = z[label - 1].softmax(-1), oracle_logits(algorithm, state[t])
                loss, counts = token_loss(algorithm.config.loss, p, logits)
                total = total + decay**step * loss
                metrics[f"loss_{step}"] += float(loss.detach())
                metrics[f"accuracy_{step}"] += float(logits.argmax() == p.argmax())
                metrics[f"acceptance_{step}"] += float(torch.minimum(p, logits.detach().softmax(-1)).sum())
                if step == 0:
                    weight += counts
                    inside += float(logits[p.argmax()] > -torch.inf)
    return total, weight, metrics | ({"in_vocabulary": inside} if algorithm.config.draft_vocab_size else {})


def gradients(algorithm: Eagle3, total: Tensor) -> dict[str, Tensor]:
    algorithm.drafter.zero_grad()
    total.backward()
    weights = algorithm.drafter.named_parameters()
    return {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}


def assert_close(ours: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    """Relative to the largest entry: float32 sums in another order differ by this much."""
    assert (ours - expected).abs().max() <= relative * expected.abs().max()


def assert_equals_oracle(algorithm: Eagle3, target: HfTarget, rows: list[Row]) -> None:
    captured = next(target.capture([rows]))
    loss = algorithm.loss(algorithm.collate(captured))
    ours = gradients(algorithm, loss.total)

    expected, weight, metrics = oracle_loss(algorithm, target, rows)
    assert loss.total.item() == pytest.approx(expected.item(), rel=2e-5)
    assert loss.weight == weight
    assert {name: value.item() for name, value in loss.metrics.items()} == pytest.approx(metrics, rel=1e-4)
    oracle = gradients(algorithm, expected)
    trained = {name for name, weight in algorithm.drafter.named_parameters() if weight.requires_grad}
    assert ours.keys() == oracle.keys() == trained
    for name, gradient in ours.items():
        assert_close(gradient, oracle[name], relative=2e-4)


@pytest.mark.parametrize("rows", [ROWS, [row(QUERY_BLOCK + 90, range(5, QUERY_BLOCK + 80))]], ids=["short", "blocks"])
def test_loss_metrics_and_gradients_equal_those_of_the_dense_oracle(target: HfTarget, rows: list[Row]) -> None:
    assert_equals_oracle(eagle3(target, ttt_steps=3, step_decay=0.7), target, rows)


@pytest.mark.parametrize(
    "options", [{}, REDUCED, MANY, MANY | REDUCED, OTHERS], ids=["plain", "reduced", "many", "many, reduced", "others"]
)
@pytest.mark.parametrize("loss", ["soft_ce", "forward_kl", "lk"])
def test_each_loss_equals_the_oracles_with_and_without_the_options(
    target: HfTarget, loss: str, options: dict[str, Any]
) -> None:
    assert_equals_oracle(eagle3(target, loss=loss, **options), target, ROWS)


@pytest.mark.parametrize("vocabulary", [{}, REDUCED], ids=["whole", "reduced"])
def test_a_frozen_head_is_the_targets_rows_and_has_no_gradient_but_is_stored(
    target: HfTarget, vocabulary: dict[str, Any]
) -> None:
    settings = load(flags={"eagle3.head": "frozen"} | {f"eagle3.{name}": value for name, value in vocabulary.items()})
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    assert isinstance(algorithm, Eagle3)
    if vocabulary:
        algorithm.drafter.take_vocabulary(torch.arange(3, 83, 2), target)

    assert_equals_oracle(algorithm, target, ROWS)
    assert algorithm.drafter.lm_head.weight.grad is None
    rows = target.head[3:83:2] if vocabulary else target.head
    assert torch.equal(algorithm.drafter.state_dict()["lm_head.weight"], rows)


def test_layout_of_a_worked_example(target: HfTarget) -> None:
    """Prompt x0..x4, answer x5..x8, three steps, as in docs/drafters.md."""
    algorithm = eagle3(target, ttt_steps=3)
    one = row(9, range(5, 9))

    layout = algorithm.collate(next(target.capture([[one]])))

    assert layout is not None
    assert layout.positions.tolist() == [2, 3, 4, 5, 6, 0, 1]  # those that draft, then those before them
    assert layout.next_ids.tolist() == one.ids[[3, 4, 5, 6, 7, 1, 2]].tolist()
    assert (
        layout.draft_ids.tolist() == one.ids[torch.tensor([[3, 4, 5, 6, 7], [4, 5, 6, 7, 8], [5, 6, 7, 8, 8]])].tolist()
    )
    # x6, x7, x8 are learnt; x5 is the target's own. Step 0 learns x6 at position 4, step 2 learns it at position 2.
    assert layout.positions[layout.chosen].tolist() == [4, 5, 6]
    assert layout.positions[layout.chosen - 2].tolist() == [2, 3, 4]
    assert (layout.spans.drafting, layout.spans.context) == ([5], [2])


def test_a_row_weighs_as_much_alone_as_in_a_batch(target: HfTarget) -> None:
    algorithm = eagle3(target)

    together = algorithm.loss(algorithm.collate(next(target.capture([ROWS]))))
    alone = [algorithm.loss(algorithm.collate(next(target.capture([[one]])))) for one in ROWS]

    assert together.num_tokens == sum(loss.num_tokens for loss in alone) == 4 + 7 + 9 + 1 + 18
    assert together.total.item() == pytest.approx(sum(loss.total.item() for loss in alone), rel=1e-5)


def test_rows_without_a_token_to_learn_give_no_loss_and_gradients_of_zero(target: HfTarget) -> None:
    algorithm = eagle3(target)
    nothing = [row(8), row(9, range(8, 9))]

    alone = algorithm.loss(algorithm.collate(next(target.capture([nothing]))))
    mixed = algorithm.loss(algorithm.collate(next(target.capture([[nothing[0], ROWS[0], nothing[1]]]))))

    assert alone.num_tokens == 0
    assert alone.total.item() == 0
    zeros = gradients(algorithm, alone.total)
    assert zeros.keys() == dict(algorithm.drafter.named_parameters()).keys()
    assert all(not gradient.any() for gradient in zeros.values())
    assert mixed.num_tokens == 4
    assert alone.metrics.keys() == mixed.metrics.keys()


def test_drafting_equals_the_oracle_over_the_drafted_tokens(target: HfTarget) -> None:
    algorithm = eagle3(target, ttt_steps=4)
    prefix = row(17, range(10, 17))
    captured = next(target.capture([[prefix]]))[0]

    proposer = algorithm.proposer()
    logits = proposer.propose(prefix.ids[1:], captured.hidden[:16], 4).logits

    drafted = logits.argmax(-1)
    ids = torch.cat((prefix.ids, drafted))
    hidden = torch.cat((captured.hidden, torch.zeros(4, captured.hidden.shape[1])))  # not seen by position 15
    for step, state in enumerate(oracle_states(algorithm, ids, hidden, 4)):
        assert_close(logits[step], oracle_logits(algorithm, state[15]))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())))
def test_each_step_of_training_equals_that_step_of_drafting(target: HfTarget, options: dict[str, Any]) -> None:
    algorithm = eagle3(target, ttt_steps=4, **options)
    prefix = row(17, range(10, 17))
    hidden = next(target.capture([[prefix]]))[0].hidden

    draft = algorithm.proposer().propose(prefix.ids[1:], hidden[:16], 4)

    whole = Row("whole", torch.cat((prefix.ids, torch.tensor([*draft.ids, 5]))), torch.arange(22) >= 10)
    layout = algorithm.collate(next(target.capture([[whole]])))
    assert layout is not None
    position = layout.positions.tolist().index(15)
    assert layout.draft_ids[:, position].tolist() == [int(prefix.ids[16]), *draft.ids[:3]]
    assert draft.logits.shape == (4, VOCAB)
    can_draft = algorithm.drafter.t2d if "draft_vocab_size" in options else torch.ones(VOCAB, dtype=torch.bool)
    assert (draft.logits[:, ~can_draft] == -torch.inf).all()
    for step, passed in enumerate(algorithm.unroll(layout)):
        trained = algorithm.drafter.lm_head(algorithm.drafter.normed(passed[position]))
        assert_close(draft.logits[step, can_draft], trained)


def test_a_draft_does_not_depend_on_how_the_prefix_arrived_or_on_drafts_before_it(target: HfTarget) -> None:
    algorithm = eagle3(target)
    prefix = row(40, range(10, 40))
    hidden = next(target.capture([[prefix]]))[0].hidden

    at_once = algorithm.proposer().propose(prefix.ids[1:], hidden[:39], 3).logits
    proposer = algorithm.proposer()
    for start, stop in ((0, 20), (20, 21), (21, 25), (25, 39)):
        piecewise = proposer.propose(prefix.ids[start + 1 : stop + 1], hidden[start:stop], 3).logits

    assert_close(piecewise, at_once)
    assert algorithm.proposer().propose(prefix.ids[1:], hidden[:39], 3).ids == at_once.argmax(-1).tolist()


def test_tensors_have_the_names_and_shapes_that_engines_read(target: HfTarget) -> None:
    tensors = eagle3(target).drafter.state_dict()

    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (64, 192),
        "midlayer.self_attn.q_proj.weight": (128, 128),
        "midlayer.self_attn.k_proj.weight": (64, 128),
        "midlayer.self_attn.v_proj.weight": (64, 128),
        "midlayer.self_attn.o_proj.weight": (64, 128),
        "midlayer.mlp.gate_proj.weight": (96, 64),
        "midlayer.mlp.up_proj.weight": (96, 64),
        "midlayer.mlp.down_proj.weight": (64, 96),
        "midlayer.input_layernorm.weight": (64,),
        "midlayer.hidden_norm.weight": (64,),
        "midlayer.post_attention_layernorm.weight": (64,),
        "norm.weight": (64,),
        "lm_head.weight": (VOCAB, 64),
    }


def test_options_add_the_tensors_that_engines_read_for_them(target: HfTarget) -> None:
    plain = eagle3(target).drafter.state_dict()

    tensors = eagle3(target, **MANY, **REDUCED).drafter.state_dict()
    tensors |= eagle3(target, **OTHERS, **REDUCED).drafter.state_dict()

    added = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items() if name not in plain}
    assert added == {
        "input_norm.weight": ((192,), torch.float32),
        "fc_norm.0.weight": ((64,), torch.float32),
        "fc_norm.1.weight": ((64,), torch.float32),
        "fc_norm.2.weight": ((64,), torch.float32),
        "midlayer.self_attn.q_norm.weight": ((32,), torch.float32),
        "midlayer.self_attn.k_norm.weight": ((32,), torch.float32),
        "d2t": ((40,), torch.int64),
        "t2d": ((VOCAB,), torch.bool),
    }
    assert plain.keys() < tensors.keys()
    assert tensors["lm_head.weight"].shape == (40, 64)


def test_a_vocabulary_that_is_taken_gives_offsets_a_mask_and_the_targets_rows(target: HfTarget) -> None:
    settings = load(flags={"eagle3.draft_vocab_size": 4})
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    assert isinstance(algorithm, Eagle3)

    algorithm.drafter.take_vocabulary(torch.tensor([2, 3, 50, 96]), target)

    tensors = algorithm.drafter.state_dict()
    assert tensors["d2t"].tolist() == [2, 2, 48, 93]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [2, 3, 50, 96]
    assert torch.equal(tensors["lm_head.weight"], target.head[[2, 3, 50, 96]])
    again = algorithms.build(algorithm.config, target)
    again.drafter.load_state_dict(tensors)
    assert isinstance(again, Eagle3)
    assert again.drafter.draft_ids().tolist() == [2, 3, 50, 96]  # pyright: ignore[reportOptionalMemberAccess]


def test_a_draft_vocabulary_is_at_most_the_targets_and_is_none_where_it_is_the_whole(target: HfTarget) -> None:
    whole = algorithms.configure(load(flags={"eagle3.draft_vocab_size": VOCAB}), target)

    assert whole.draft_vocab_size is None
    with pytest.raises(SettingsError, match=r"eagle3.draft_vocab_size = 98: .* a vocabulary of 97"):
        algorithms.configure(load(flags={"eagle3.draft_vocab_size": VOCAB + 1}), target)


def test_two_norms_of_the_same_states_are_refused(target: HfTarget) -> None:
    with pytest.raises(SettingsError, match=r"eagle3\.fc_norm and eagle3\.norm_before_fc are both set"):
        algorithms.configure(load(flags={"eagle3.fc_norm": True, "eagle3.norm_before_fc": True}), target)


def test_a_drafter_that_was_stored_before_there_were_options_has_none(target: HfTarget, tmp_path: Path) -> None:
    algorithm = eagle3(target)
    drafter.save(tmp_path, algorithm.config, algorithm.drafter.state_dict())
    held = json.loads((tmp_path / "drafter.json").read_text())
    fields = {*NORMS, "loss", "head", "style", "draft_vocab_size", "num_layers"}
    (tmp_path / "drafter.json").write_text(json.dumps({key: value for key, value in held.items() if key not in fields}))

    config, tensors = drafter.load(tmp_path)

    assert config == algorithm.config
    algorithms.build(config, target).drafter.load_state_dict(tensors)


def test_the_style_is_llamas_or_as_the_target(target: HfTarget) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    qwen3 = HfTarget(Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval(), [0, 1, 2], "qwen3")
    auto = load(flags={"eagle3.style": "auto"})

    assert algorithms.configure(load(), qwen3).style == "llama"
    assert algorithms.configure(auto, qwen3).style == "qwen3"
    assert algorithms.configure(auto, target).style == "llama"


def test_a_new_drafter_has_the_targets_norm_and_head_and_depends_on_the_seed_alone(target: HfTarget) -> None:
    config = algorithms.configure(load(), target)

    def build(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return algorithms.build(config, target).drafter.state_dict()

    first, again, other = build(0), build(0), build(1)
    assert torch.equal(first["lm_head.weight"], target.head)
    assert torch.equal(first["norm.weight"], target.norm_scale)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_matrices_begin_smaller_where_muon_trains_them(target: HfTarget) -> None:
    spreads = {
        name: float(
            algorithms.build(algorithms.configure(load(flags=flags), target), target).drafter.fc.weight.detach().std()
        )
        for name, flags in {"adamw": {}, "muon": {"trainer.optimizer": "muon"}}.items()
    }

    assert spreads["adamw"] == pytest.approx((3 * 64) ** -0.5, rel=0.05)
    assert spreads["muon"] == pytest.approx(0.02, rel=0.05)


def test_bfloat16_comes_near_float32(target: HfTarget) -> None:
    algorithm = eagle3(target)
    layout = algorithm.collate(next(target.capture([ROWS])))

    exact = algorithm.loss(layout)
    with torch.autocast("cpu", torch.bfloat16):
        rough = algorithm.loss(layout)

    # bfloat16 keeps 8 bits: 0.4 % for each rounding.
    assert rough.total.item() == pytest.approx(exact.total.item(), rel=2e-2)
    gradient, expected = gradients(algorithm, rough.total)["fc.weight"], gradients(algorithm, exact.total)["fc.weight"]
    assert F.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.99
    assert rough.total.item() != exact.total.item()


def test_the_targets_scaling_of_positions_reaches_the_drafter(target: HfTarget) -> None:
    config = algorithms.configure(load(), target)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    positions = torch.arange(300)

    plain, _ = Rotary(config).tables(positions)
    scaled, _ = Rotary(DrafterConfig(**(asdict(config) | {"rope_parameters": yarn}))).tables(positions)

    # YaRN multiplies cosine and sine by 0.1 ln(factor) + 1, and turns the slowest pairs `factor` times slower.
    assert scaled[0, 0].tolist() == pytest.approx([0.1 * torch.tensor(4.0).log().item() + 1] * config.head_dim)
    slow = config.head_dim // 2 - 1
    assert scaled[200, 0, slow] / scaled[0, 0, slow] == pytest.approx(plain[50, 0, slow].item(), abs=1e-6)


SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    "yarn of DeepSeek": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 0.7,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "factor": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("is_old", [True, False], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
@pytest.mark.parametrize("kind", [(LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)])
def test_positions_are_turned_as_the_target_turns_them_whichever_schema_it_is_stored_in(
    kind: tuple[Any, Any], scaling: dict[str, Any], is_old: bool
) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 3, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
    rest = {name: value for name, value in scaling.items() if name != "rope_type"}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": scaling["rope_type"], **rest}}
    new = {"rope_parameters": {"rope_theta": 5e5, **scaling}}
    model = kind[1](kind[0].from_dict({**sizes, **heads, **(old if is_old else new)})).eval()
    positions = torch.arange(0, 500, 7)

    config = algorithms.configure(load(), HfTarget(model, [0, 1, 2], "scaled"))

    cos, sin = Rotary(config).tables(positions)
    theirs = model.model.rotary_emb(torch.empty(0), positions[None])
    assert torch.equal(cos[:, 0], theirs[0][0])
    assert torch.equal(sin[:, 0], theirs[1][0])
    plain, _ = Rotary(
        DrafterConfig(**(asdict(config) | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}))
    ).tables(positions)
    assert not torch.allclose(cos, plain)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_an_export_says_the_scaling_in_both_schemas(target: HfTarget, scaling: dict[str, Any]) -> None:
    parameters = {"rope_theta": 5e5, **scaling}
    config = DrafterConfig(**(asdict(algorithms.configure(load(), target)) | {"rope_parameters": parameters}))
    positions = torch.arange(0, 500, 7)

    written = json.loads(json.dumps(native.eagle3(config, "float32")))

    expected, _ = Rotary(config).tables(positions)
    old_readers = {"rope_theta": written["rope_theta"], **written["rope_scaling"]}
    for read in (written["rope_parameters"], old_readers):
        tables, _ = Rotary(DrafterConfig(**(asdict(config) | {"rope_parameters": read}))).tables(positions)
        assert torch.equal(tables, expected)


def test_the_positions_of_a_drafter_are_turned_as_every_engine_turns_them() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    glm = GlmForCausalLM(GlmConfig(**sizes, **heads)).eval()
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads)).eval()
    assert glm.config.rope_parameters["partial_rotary_factor"] == 0.5
    assert set(gemma.config.rope_parameters) == {"full_attention", "sliding_attention"}

    of_glm = algorithms.configure(load(), HfTarget(glm, [0, 1, 2], "glm"))
    of_gemma = algorithms.configure(load(), HfTarget(gemma, [0, 1, 2], "gemma"))

    assert of_glm.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert of_gemma.rope_parameters == gemma.config.rope_parameters["full_attention"]
