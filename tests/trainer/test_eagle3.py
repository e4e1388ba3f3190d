"""EAGLE-3 against a slow oracle that is written from the definition: one row, one step, one dense mask at a time."""

from __future__ import annotations

from dataclasses import asdict
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
)

from draftfleet.settings import load
from trainer import algorithms
from trainer.algorithms.eagle3 import Eagle3
from trainer.algorithms.head import soft_cross_entropy
from trainer.algorithms.layers import QUERY_BLOCK, Rotary
from trainer.drafter import DrafterConfig
from trainer.targets import Row
from trainer.targets.hf import HfTarget

VOCAB = 97


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


def eagle3(target: HfTarget, **knobs: Any) -> Eagle3:
    """A drafter whose every weight is random, the norms included."""
    settings = load(flags={f"trainer.{name}": value for name, value in knobs.items()})
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    assert isinstance(algorithm, Eagle3)
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
    return Row(f"row-{length}", torch.randint(0, VOCAB, (length,), generator=generator), mask)


ROWS = [row(9, range(4, 9)), row(31, range(7, 15), range(20, 30)), row(14, range(12, 14)), row(22, range(3, 22))]


# The oracle. Shapes: T tokens of one row, N steps.


def oracle_states(algorithm: Eagle3, ids: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
    """Output of each step at every position of a row, (T, H), from concatenated keys and an explicit mask."""
    weights = dict(algorithm.drafter.named_parameters())
    config = algorithm.config
    length = len(ids)
    index = torch.arange(length)
    state = hidden @ weights["fc.weight"].T
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    for step in range(steps):
        tokens = F.pad(ids, (0, step + 1))[step + 1 :]
        x = torch.cat(
            (
                norm(algorithm.drafter.midlayer.input_layernorm, algorithm.embed(tokens)),
                norm(algorithm.drafter.midlayer.hidden_norm, state),
            ),
            -1,
        )

        def heads(name: str, x: Tensor = x) -> Tensor:
            return (x @ weights[f"midlayer.self_attn.{name}.weight"].T).view(length, -1, config.head_dim)

        query = turn(heads("q_proj"), index + step, config)
        keys.append(turn(heads("k_proj"), index + step, config))
        values.append(heads("v_proj"))
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

        state = state + attended.reshape(length, -1) @ weights["midlayer.self_attn.o_proj.weight"].T
        inner = norm(algorithm.drafter.midlayer.post_attention_layernorm, state)
        gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        state = state + (F.silu(inner @ gate) * (inner @ up)) @ down
        states.append(state)
    return states


def norm(module: Any, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + module.eps).sqrt() * module.weight


def turn(x: Tensor, positions: Tensor, config: DrafterConfig) -> Tensor:
    half = config.head_dim // 2
    angle = positions[:, None] * config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def oracle_loss(algorithm: Eagle3, target: HfTarget, rows: list[Row]) -> tuple[Tensor, dict[str, float]]:
    steps, decay = algorithm.config.ttt_steps, algorithm.config.step_decay
    total = torch.zeros(())
    metrics = {f"{name}_{step}": 0.0 for name in ("loss", "accuracy", "acceptance") for step in range(steps)}
    for one in rows:
        captured = next(target.capture([[one]]))[0]
        states = oracle_states(algorithm, one.ids, captured.hidden, steps)
        z = target.logits(captured.last)
        for step, state in enumerate(states):
            logits = norm(algorithm.drafter.norm, state) @ algorithm.drafter.lm_head.weight.T
            for t in range(len(one.ids)):
                label = t + 2 + step
                if label >= len(one.ids) or not (one.mask[label - 1] and one.mask[label]):
                    continue
                p = z[label - 1].softmax(-1)
                loss = -(p * logits[t].log_softmax(-1)).sum()
                total = total + decay**step * loss
                metrics[f"loss_{step}"] += float(loss.detach())
                metrics[f"accuracy_{step}"] += float(logits[t].argmax() == p.argmax())
                metrics[f"acceptance_{step}"] += float(torch.minimum(p, logits[t].detach().softmax(-1)).sum())
    return total, metrics


def gradients(algorithm: Eagle3, total: Tensor) -> dict[str, Tensor]:
    algorithm.drafter.zero_grad()
    total.backward()
    weights = algorithm.drafter.named_parameters()
    return {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}


def assert_close(ours: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    """Relative to the largest entry: float32 sums in another order differ by this much."""
    assert (ours - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("rows", [ROWS, [row(QUERY_BLOCK + 90, range(5, QUERY_BLOCK + 80))]], ids=["short", "blocks"])
def test_loss_metrics_and_gradients_equal_those_of_the_dense_oracle(target: HfTarget, rows: list[Row]) -> None:
    algorithm = eagle3(target, ttt_steps=3, step_decay=0.7)

    captured = next(target.capture([rows]))
    loss = algorithm.loss(algorithm.collate(captured))
    ours = gradients(algorithm, loss.total)

    expected, metrics = oracle_loss(algorithm, target, rows)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert {name: value.item() for name, value in loss.metrics.items()} == pytest.approx(metrics, rel=1e-4)
    oracle = gradients(algorithm, expected)
    assert ours.keys() == oracle.keys() == dict(algorithm.drafter.named_parameters()).keys()
    for name, gradient in ours.items():
        assert_close(gradient, oracle[name], relative=1e-4)


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


def test_drafting_equals_the_training_unroll_over_the_drafted_tokens(target: HfTarget) -> None:
    algorithm = eagle3(target, ttt_steps=4)
    prefix = row(17, range(10, 17))
    captured = next(target.capture([[prefix]]))[0]

    proposer = algorithm.proposer()
    logits = proposer.propose(prefix.ids[1:], captured.hidden[:16], 4).logits

    drafted = logits.argmax(-1)
    ids = torch.cat((prefix.ids, drafted))
    hidden = torch.cat((captured.hidden, torch.zeros(4, captured.hidden.shape[1])))  # not seen by position 15
    for step, state in enumerate(oracle_states(algorithm, ids, hidden, 4)):
        expected = norm(algorithm.drafter.norm, state[15]) @ algorithm.drafter.lm_head.weight.T
        assert_close(logits[step], expected)


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


def test_the_head_in_slices_equals_the_head_at_once() -> None:
    torch.manual_seed(0)
    tokens, vocab = 300, 4096  # of which a slice of the CPU holds 128
    states = torch.randn(2, tokens, 16, requires_grad=True)
    weight = torch.randn(vocab, 16, requires_grad=True)
    last = torch.randn(tokens, vocab) * 3

    total, sums = soft_cross_entropy(states, weight, last, lambda part: part, [1.0, 0.5])
    (2 * total).backward()
    ours = [states.grad, weight.grad]

    logits = states @ weight.T
    expected = -(last.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert_close(sums[0], expected.sum(-1).detach())
    assert sums[1].tolist() == (logits.argmax(-1) == last.argmax(-1)).sum(-1).tolist()
    assert_close(sums[2], torch.minimum(logits.softmax(-1), last.softmax(-1)).sum((-1, -2)).detach())
    wanted = torch.autograd.grad(2 * (expected[0].sum() + 0.5 * expected[1].sum()), [states, weight])
    for gradient, oracle in zip(ours, wanted, strict=True):
        assert gradient is not None
        assert_close(gradient, oracle)


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
