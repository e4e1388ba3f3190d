"""Flex attention against the eager forms: what each query sees, the losses, every gradient; and what may not happen in
a layer that is compiled or computed again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from draftfleet.settings import load
from trainer import algorithms
from trainer.algorithms import execution, flex
from trainer.algorithms.execution import PLAIN, Execution, settle
from trainer.algorithms.flex import TILE, Places, Stretch
from trainer.targets import Captured, Row
from trainer.targets.hf import HfTarget

VOCAB = 97
ALGORITHMS = ("eagle3", "dflash")


@pytest.fixture(scope="module")
def target() -> HfTarget:
    """A random Llama with grouped queries."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return HfTarget(LlamaForCausalLM(config).eval().requires_grad_(False), [1, 4, 6], "random llama")


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


def build(target: HfTarget, name: str, **knobs: Any) -> Any:
    """A drafter whose every weight is random, the norms included."""
    flags = {
        "trainer.algorithm": name, "dflash.num_layers": 2, "dflash.block_size": 5, "dflash.mask_token_id": VOCAB - 1,
        "dflash.anchors": 24,
    }  # fmt: skip
    settings = load(flags=flags | {key.replace("__", "."): value for key, value in knobs.items()})
    algorithm: Any = algorithms.build(algorithms.configure(settings, target), target)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in algorithm.drafter.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return algorithm


def row(length: int, *generated: range, seed: int = 0) -> Row:
    mask = torch.zeros(length, dtype=torch.bool)
    for span in generated:
        mask[list(span)] = True
    ids = torch.randint(0, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(seed + length))
    return Row(f"row-{length}", ids, mask)


SHORT = [row(9, range(4, 9)), row(31, range(7, 15), range(20, 30)), row(14, range(12, 14)), row(22, range(3, 22))]
LONG = [row(320, range(20, 310)), row(41, range(5, 40)), row(170, range(20, 30), range(160, 170))]


def capture(target: HfTarget, rows: list[Row]) -> list[Captured]:
    return next(iter(target.capture([rows])))


def found(algorithm: Any, captured: list[Captured]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of each weight."""
    algorithm.drafter.zero_grad()
    loss = algorithm.loss(algorithm.collate(captured))
    loss.total.backward()
    return float(loss.total.detach()), {
        name: weight.grad.clone() for name, weight in algorithm.drafter.named_parameters() if weight.grad is not None
    }


def assert_alike(ours: Tensor, expected: Tensor) -> None:
    """Relative to the largest entry: float32 sums in another order differ by this much."""
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


# What is seen


def dense(mask: Any) -> Tensor:
    """Every pair of query and key that the kernel would count, by its tiles and, where those are partial, its rule."""
    queries, keys = mask.seq_lengths
    nothing, every = torch.zeros(1, 1, 1), torch.eye(keys)[None, None]
    weights, _ = flex.written_out(nothing.expand(1, 1, queries, 1), nothing.expand(1, 1, keys, 1), every, mask)
    return weights[0, 0] > 0


@pytest.mark.parametrize("rows", [SHORT, LONG], ids=["within a tile", "many tiles"])
def test_a_drafting_position_sees_its_row_up_to_itself(target: HfTarget, rows: list[Row]) -> None:
    layout = build(target, "eagle3").collate(capture(target, rows))
    sizes = [*layout.spans.drafting, *layout.spans.context]
    places = list(
        zip(
            [n % len(rows) for n, size in enumerate(sizes) for _ in range(size)], layout.positions.tolist(), strict=True
        )
    )
    expected = torch.tensor([
        [of == row and at <= position for of, at in places] for row, position in places[: layout.draft_ids.shape[1]]
    ])  # fmt: skip

    mask = flex.block_mask(*layout.reach())

    assert torch.equal(dense(mask), expected)
    assert (mask.full_kv_num_blocks.sum() > 0) == (rows is LONG)


@pytest.mark.parametrize("window", [None, 7, 140])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [SHORT, LONG], ids=["within a tile", "many tiles"])
def test_a_slot_sees_the_context_before_its_anchor_within_its_window_and_its_own_block(
    target: HfTarget, rows: list[Row], causal: bool, window: int | None
) -> None:
    layout = build(target, "dflash").collate(capture(target, rows))
    num_blocks, num_slots = layout.positions.shape
    row_of_key = torch.tensor(
        [number for number, anchors in enumerate(layout.anchors) for _ in range(int(anchors[-1]))]
    )
    row_of_block = torch.tensor([number for number, anchors in enumerate(layout.anchors) for _ in anchors])
    block, slot = torch.arange(num_blocks), torch.arange(num_slots)

    for num_queries in (num_slots, num_slots - 1):
        mask = flex.block_mask(*layout.reach(window, causal, num_queries))

        seen = dense(mask).unflatten(0, (num_blocks, num_queries))
        of_context, of_block = seen.split([len(row_of_key), num_blocks * num_slots], dim=-1)
        asking = layout.positions[:, -num_queries:, None]
        context = (row_of_key == row_of_block[:, None, None]) & (
            layout.context_positions < layout.positions[:, :1, None]
        )
        if window is not None:
            context = context & (layout.context_positions > asking - window)
        own = (block[:, None, None, None] == block[:, None]).expand(-1, num_queries, -1, num_slots)
        if causal:
            own = own & (slot <= slot[-num_queries:, None, None])
        assert torch.equal(of_context, context.expand_as(of_context))
        assert torch.equal(of_block, own.flatten(2))


def test_tiles_that_no_query_sees_are_passed_over_and_those_seen_whole_are_not_asked() -> None:
    """Two rows of three tiles each: of the 36 pairs of tiles 6 lie on the diagonals, and 6 below them."""
    group = torch.arange(6).div(3, rounding_mode="floor").repeat_interleave(TILE).int()
    position = torch.arange(3 * TILE).repeat(2).int()

    mask = flex.block_mask([Stretch(group, torch.zeros_like(position), position)], Places(group, position))

    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 6
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert mask.full_kv_indices is not None
    assert mask.full_kv_indices[0, 0, 5, :2].tolist() == [3, 4]
    assert mask.q_num_blocks is not None  # the backward pass goes by keys
    assert mask.q_num_blocks[0, 0].tolist() == [1] * 6


# The kernel, and what stands in for it on a CPU


def test_torchs_own_form_agrees_with_ours_in_both_outputs_and_their_gradients_and_is_traced_twice_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for a batch of one tile, once for all others. Forward and backward pass, as autograd traces them for a
    GPU; only the last step, from the trace to a kernel, needs one."""
    monkeypatch.setattr(flex.torch_flex, "_validate_device", lambda *_: None)  # it refuses a backward pass on a CPU
    counter = CompileCounterWithBackend("aot_eager")
    kernel = torch.compile(flex.call, dynamic=True, fullgraph=True, backend=counter)
    dice = torch.Generator().manual_seed(0)

    for lengths in ([20, 31], [150], [77, 90]):
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()
        at = torch.cat([torch.arange(length) for length in lengths]).int()
        mask = flex.block_mask(
            [Stretch(rows, at - 9, at - 4), Stretch(rows, at, at)], Places(rows, at)
        )  # two stretches, as DFlash has
        shapes = [(1, heads, len(rows), 32) for heads in (4, 2, 2)]
        inputs = [torch.randn(shape, generator=dice).requires_grad_() for shape in shapes]

        theirs, ours = kernel(*inputs, mask), flex.written_out(*inputs, mask)

        direction = [torch.randn(part.shape, generator=dice) for part in ours]
        for one, other in zip(theirs, ours, strict=True):
            assert_alike(one, other)
        gradients = (torch.autograd.grad(parts, inputs, direction) for parts in (theirs, ours))
        for one, other in zip(*gradients, strict=True):
            assert_alike(one, other)
    assert counter.frame_count == 2


# Losses and gradients


@pytest.mark.parametrize("rows", [SHORT, LONG], ids=["within a tile", "many tiles"])
@pytest.mark.parametrize("ttt_steps", [1, 2, 4])
@pytest.mark.parametrize("style", ["llama", "qwen3"])
def test_eagle3_learns_by_flex_attention_what_it_learns_by_the_eager_form(
    target: HfTarget, style: str, ttt_steps: int, rows: list[Row]
) -> None:
    algorithm = build(target, "eagle3", trainer__ttt_steps=ttt_steps, eagle3__style=style)
    captured = capture(target, rows)
    expected, oracle = found(algorithm, captured)

    algorithm.execution = Execution(flex=True)
    total, gradients = found(algorithm, captured)

    assert total == pytest.approx(expected, rel=1e-5)
    assert gradients.keys() == oracle.keys()
    for name, gradient in gradients.items():
        assert_alike(gradient, oracle[name])


BOTH_KINDS = {"dflash__layer_types": ["sliding_attention", "full_attention"], "dflash__sliding_window": 7}
WIDE = {"dflash__layer_types": ["full_attention", "sliding_attention"], "dflash__sliding_window": 140}


@pytest.mark.parametrize("rows", [SHORT, LONG], ids=["within a tile", "many tiles"])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"dflash__causal": True},
        BOTH_KINDS,
        BOTH_KINDS | {"dflash__causal": False},
        WIDE,
        {"dflash__block_size": 16},
    ],
    ids=["full", "causal", "both kinds", "both kinds, not causal", "wide window", "large blocks"],
)
def test_dflash_learns_by_flex_attention_what_it_learns_by_the_eager_form(
    target: HfTarget, knobs: dict[str, Any], rows: list[Row]
) -> None:
    algorithm = build(target, "dflash", **knobs)
    captured = capture(target, rows)
    expected, oracle = found(algorithm, captured)

    algorithm.execution = Execution(flex=True)
    total, gradients = found(algorithm, captured)

    assert total == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        assert_alike(gradient, oracle[name])


def test_masks_are_made_once_for_all_layers_that_see_alike(target: HfTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = flex.block_mask
    monkeypatch.setattr(flex, "block_mask", lambda *args: made.append(1) or make(*args))
    captured = capture(target, SHORT)

    for name, knobs, most in (("eagle3", {"trainer__ttt_steps": 4}, 1), ("dflash", {"dflash__num_layers": 5}, 2)):
        made.clear()
        algorithm = build(target, name, **knobs)
        algorithm.execution = Execution(flex=True, recomputes=True)
        found(algorithm, captured)
        assert len(made) == most  # the last layer of DFlash asks for one slot less


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bfloat16_by_flex_attention_is_as_near_to_float32_as_by_the_eager_form(target: HfTarget, name: str) -> None:
    algorithm, captured = build(target, name), capture(target, LONG)
    exact, _ = found(algorithm, captured)

    def rough() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return float(algorithm.loss(algorithm.collate(captured)).total.detach())

    eager = rough()
    algorithm.execution = Execution(flex=True)

    assert rough() == pytest.approx(exact, rel=2e-2)
    assert rough() == pytest.approx(eager, rel=2e-2)
    assert all(weight.dtype == torch.float32 for weight in algorithm.drafter.parameters())


# Activation checkpointing


def kept_bytes(algorithm: Any, captured: list[Captured]) -> int:
    """What the forward pass keeps for the backward pass, weights and inputs aside. A storage counts once."""
    layout = algorithm.collate(captured)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = algorithm.loss(layout)
    inputs = [*algorithm.drafter.parameters(), *(part for part in vars_of(layout) if isinstance(part, Tensor))]
    for tensor in inputs:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    del loss
    return sum(kept.values())


def vars_of(layout: Any) -> list[Any]:
    return [getattr(layout, field.name) for field in fields(layout)]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("is_flex", [False, True], ids=["eager", "flex"])
def test_activation_checkpointing_changes_no_bit_and_keeps_far_less(target: HfTarget, name: str, is_flex: bool) -> None:
    algorithm = build(target, name, dflash__num_layers=4)
    captured = capture(target, LONG)
    algorithm.execution = Execution(flex=is_flex)
    expected, oracle = found(algorithm, captured)
    before = kept_bytes(algorithm, captured)

    algorithm.execution = Execution(flex=is_flex, recomputes=True)
    total, gradients = found(algorithm, captured)
    after = kept_bytes(algorithm, captured)

    assert total == expected
    assert gradients.keys() == oracle.keys()
    assert all(torch.equal(gradient, oracle[name]) for name, gradient in gradients.items())
    assert after < 0.4 * before


# Compiling


@pytest.mark.parametrize("name", ALGORITHMS)
def test_layers_compile_whole_once_for_all_lengths_and_change_nothing(target: HfTarget, name: str) -> None:
    """`fullgraph` refuses a layer that would break."""
    algorithm = build(target, name)
    batches = [capture(target, rows) for rows in (SHORT, LONG, LONG[:2], SHORT[1:], [row(77, range(20, 60))])]
    expected = [found(algorithm, captured) for captured in batches]
    counter = CompileCounterWithBackend("eager")

    execution.compile_layers(algorithm.drafter, backend=counter)
    compiled = [found(algorithm, batches[0]), found(algorithm, batches[1])]
    traced = counter.frame_count
    compiled += [found(algorithm, captured) for captured in batches[2:]]

    assert counter.frame_count == traced > 0
    for (total, gradients), (other, oracle) in zip(compiled, expected, strict=True):
        assert total == pytest.approx(other, rel=1e-5)
        for weight, gradient in gradients.items():
            assert_alike(gradient, oracle[weight])
    execution.leave_uncompiled(algorithm.drafter)
    found(algorithm, capture(target, [row(65, range(9, 60))]))
    assert counter.frame_count == traced
    assert build(target, name).drafter.state_dict().keys() == algorithm.drafter.state_dict().keys()


# What is chosen


def settled(target: HfTarget, name: str, **knobs: str) -> tuple[Execution, bool]:
    algorithm = build(target, name)
    settings = load(flags={f"trainer.{key}": value for key, value in knobs.items()})
    settle(settings.trainer, algorithm, target)
    is_compiled = any(
        "forward" not in vars(module) and "after" in vars(module) for module in algorithm.drafter.modules()
    )
    return algorithm.execution, is_compiled or "outputs" in vars(getattr(algorithm.drafter, "midlayer", nn.Module()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_a_cpu_auto_is_the_eager_form_uncompiled_and_what_is_asked_for_is_done(target: HfTarget, name: str) -> None:
    assert settled(target, name) == (PLAIN, False)
    assert settled(target, name, attention="flex") == (Execution(flex=True), False)
    assert settled(target, name, activation_checkpointing="true") == (Execution(recomputes=True), False)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_kernel_that_does_not_compile_is_left_out_with_its_reason_and_leaves_no_trace(
    target: HfTarget, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("\nout of resource: shared memory\nmore lines")

    monkeypatch.setattr(flex, "_kernel", lambda _: refuse)
    algorithm = build(target, name)

    with caplog.at_level(logging.WARNING):
        settle(load(flags={"trainer.attention": "flex"}).trainer, algorithm, target)

    assert algorithm.execution == PLAIN
    assert "flex attention left out" in caplog.text
    assert "RuntimeError: out of resource: shared memory" in caplog.text
    assert all(weight.grad is None for weight in algorithm.drafter.parameters())


def test_layers_that_do_not_compile_are_left_as_they_are_with_the_reason(
    target: HfTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    compile_as_is = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, **options: compile_as_is(part, **options | {"backend": broken}))
    algorithm, captured = build(target, "dflash"), capture(target, SHORT)
    expected = found(algorithm, captured)[0]

    with caplog.at_level(logging.WARNING):
        settle(load(flags={"trainer.compile": "on"}).trainer, algorithm, target)

    assert "torch.compile left out" in caplog.text
    assert "no compiler here" in caplog.text
    assert found(algorithm, captured)[0] == expected


def test_what_a_device_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))

    assert flex.unusable(torch.device("cpu"), 64) is None
    assert flex.unusable(torch.device("cpu"), 8) == "it needs heads of 16 or more, the drafter's have 8"
    assert flex.unusable(torch.device("cuda", 0), 64) == (
        "it needs a GPU of compute capability 8.0 or more, cuda:0 has 7.5"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert flex.unusable(torch.device("cuda", 0), 64) is None
    monkeypatch.delattr(flex.torch_flex, "AuxRequest")
    assert "it needs torch 2.9 or newer" in str(flex.unusable(torch.device("cuda", 0), 64))


# What a GPU would wait for


class Waits(TorchDispatchMode):
    """Notes what would make the program wait for a GPU: a number, or a shape, that is read off a tensor of `loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_by_mask = name in {"index", "index_put", "index_put_", "_index_put_impl_"} and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]
        )
        if is_by_mask or name in {"_local_scalar_dense", "masked_select"}:
            self.seen.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("eagle3", {}),
        ("eagle3", {"eagle3__draft_vocab_size": 40}),
        ("eagle3", {"eagle3__loss": "lk"}),
        ("dflash", {}),
        ("dflash", {"dflash__weights": "dpace", "dflash__labels": "soft"}),
    ],
)
def test_a_batch_has_one_number_read_off_the_device_before_its_backward_pass_ends(
    target: HfTarget, name: str, knobs: dict[str, Any]
) -> None:
    """The weight of its loss, where that is not the number of its tokens."""
    algorithm = build(target, name, **knobs)
    algorithm.execution = Execution(flex=True)
    layout = algorithm.collate(capture(target, SHORT))

    with Waits() as waits:
        algorithm.loss(layout).total.backward()

    is_by_weight = name == "dflash" or "eagle3__draft_vocab_size" in knobs
    assert waits.seen == ["_local_scalar_dense"] * is_by_weight
