"""The head in slices: each loss and its gradients against autograd over all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.algorithms.head import FEWEST_TOKENS, SLICE_ELEMENTS, Objective, head_loss

TOKENS, VOCAB, WIDTH = 300, 4096, 16  # of which a slice of the CPU holds 128 tokens
SCALES = [1.0, 0.5]


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    """States of two steps, and the target's logits: those of the first tokens far from all that can be drafted."""
    torch.manual_seed(0)
    last = torch.randn(TOKENS, VOCAB) * 3
    last[:5, 1::3] += 60
    return torch.randn(2, TOKENS, WIDTH, requires_grad=True), last


def oracle(kind: str, states: Tensor, weight: Tensor, last: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each step and token (S, M), and what sampling would accept of it."""
    p = last.double().softmax(-1)[:, ids]
    mass = p.sum(-1, keepdim=True)
    log_renormed = last.double()[:, ids].log_softmax(-1)
    log_q = (states @ weight.T).double().log_softmax(-1)
    accepted = torch.minimum(p, log_q.exp()).sum(-1)
    if kind == "soft_ce":
        can = (last.argmax(-1)[:, None] == ids).any(-1)
        return -(log_renormed.exp() * log_q).sum(-1) * can, accepted
    divergence = mass[:, 0] * (log_renormed.exp() * (log_renormed - log_q)).sum(-1)
    if kind == "forward_kl":
        return divergence, accepted
    share = torch.exp(-3 * accepted.detach())
    return share * divergence + (1 - share) * (1 - accepted), accepted


def assert_close(ours: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    assert (ours - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, VOCAB, 3)], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", ["soft_ce", "forward_kl", "lk"])
def test_the_head_in_slices_equals_the_head_at_once(
    inputs: tuple[Tensor, Tensor], kind: Any, draft_ids: Tensor | None
) -> None:
    states, last = inputs
    ids = torch.arange(VOCAB) if draft_ids is None else draft_ids
    weight = torch.randn(len(ids), WIDTH, requires_grad=True)

    found = head_loss(states, weight, last, lambda part: part, Objective(SCALES, VOCAB, kind, draft_ids))
    (2 * found.total).backward()
    ours = [states.grad, weight.grad]

    losses, accepted = oracle(kind, states, weight, last, ids)
    assert_close(found.sums[0], losses.sum(-1).detach().float())
    matches = ids[(states @ weight.T).argmax(-1)] == last.argmax(-1)
    assert found.sums[1].tolist() == matches.sum(-1).tolist()
    assert_close(found.sums[2], accepted.sum(-1).detach().float())
    assert int(found.num_inside) == int((last.argmax(-1)[:, None] == ids).any(-1).sum())
    expected_total = losses[0].sum() + 0.5 * losses[1].sum()
    assert found.total.item() == pytest.approx(expected_total.item(), rel=1e-5)
    wanted = torch.autograd.grad(2 * expected_total, [states, weight])
    for gradient, expected in zip(ours, wanted, strict=True):
        assert gradient is not None
        assert_close(gradient, expected)


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, VOCAB, 3)], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", ["forward_kl", "lk"])
def test_a_drafter_that_equals_its_target_has_nothing_left_to_learn(kind: Any, draft_ids: Tensor | None) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(1, 80, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH)
    own = weight if draft_ids is None else weight[draft_ids]
    last = states[0].detach() @ weight.T

    found = head_loss(states, own, last, lambda part: part, Objective([1.0], VOCAB, kind, draft_ids))

    untrained = 80 * 4  # a token of a random drafter is off by 4 and more
    if kind == "forward_kl" or draft_ids is None:
        assert float(found.sums[0].detach()) == pytest.approx(0, abs=1e-4 * untrained)
    if draft_ids is None:
        assert float(found.sums[2]) == pytest.approx(80, rel=1e-4)
    else:
        assert 0 < float(found.sums[2]) < 80


@pytest.mark.parametrize("num_draft_ids", [None, 64])
def test_no_more_tokens_than_a_slice_has_logits_at_a_time(
    inputs: tuple[Tensor, Tensor], num_draft_ids: int | None
) -> None:
    states, last = inputs
    ids = None if num_draft_ids is None else torch.arange(num_draft_ids)
    asked: list[int] = []

    def logits(part: Tensor) -> Tensor:
        asked.append(len(part))
        return part

    weight = torch.randn(num_draft_ids or VOCAB, WIDTH, requires_grad=True)
    head_loss(states, weight, last, logits, Objective(SCALES, VOCAB, "lk", ids))

    assert asked == [128, 128, 44]
    assert max(asked) * VOCAB == SLICE_ELEMENTS["cpu"]
    assert max(asked) > FEWEST_TOKENS


def test_a_frozen_weight_has_no_gradient_and_that_of_the_states_is_the_same(inputs: tuple[Tensor, Tensor]) -> None:
    states, last = inputs
    weight = torch.randn(VOCAB, WIDTH)

    gradients: list[Tensor] = []
    for is_trained in (True, False):
        own = weight.clone().requires_grad_(is_trained)
        states.grad = None
        head_loss(states, own, last, lambda part: part, Objective(SCALES, VOCAB)).total.backward()
        assert states.grad is not None
        gradients.append(states.grad)
        assert (own.grad is not None) == is_trained

    assert torch.equal(*gradients)
