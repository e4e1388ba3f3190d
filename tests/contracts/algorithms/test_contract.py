"""What every algorithm keeps, whatever it drafts from. To put another under the contract: its name in NAMES."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftfleet.settings import load
from trainer import algorithms, drafter, targets
from trainer.algorithms import Algorithm
from trainer.speculate import Limits, decode, decode_with_drafter
from trainer.targets import Captured, Row
from trainer.targets.hf import HfTarget

TINY = str(Path(__file__).parents[3] / "examples/tiny-target")
NAMES = list(algorithms.ALGORITHMS)
LAYERS, K = [2, 3, 6], 3
PROMPT = 6  # tokens of each row that are no answer


@pytest.fixture(scope="module")
def target() -> HfTarget:
    target = targets.load(load(flags={"target.path": TINY}), LAYERS, torch.device("cpu"))
    assert isinstance(target, HfTarget)
    return target


@pytest.fixture(params=NAMES)
def algorithm(request: pytest.FixtureRequest, target: HfTarget) -> Algorithm:
    knobs = {
        "trainer.algorithm": request.param,
        "target.path": TINY,
        "dflash.block_size": K + 1,
        "dflash.num_layers": 1,
    }
    torch.manual_seed(1)
    return algorithms.build(algorithms.configure(load(flags=knobs), target), target)


@pytest.fixture(scope="module")
def captured(target: HfTarget) -> list[Captured]:
    """Three rows of the target's own words."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, length in enumerate((14, 24, 19)):
        ids = torch.randint(5, 2000, (length,), generator=generator)
        rows.append(Row(f"row-{number}", ids, torch.arange(length) >= PROMPT))
    return next(iter(target.capture([rows])))


def test_a_loss_is_a_sum_over_rows(algorithm: Algorithm, captured: list[Captured]) -> None:
    together = algorithm.loss(algorithm.collate(captured))
    alone = [algorithm.loss(algorithm.collate([one])) for one in captured]

    assert together.num_tokens == sum(loss.num_tokens for loss in alone) > 0
    assert together.weight == pytest.approx(sum(loss.weight for loss in alone))
    assert float(together.total.detach()) == pytest.approx(sum(float(loss.total.detach()) for loss in alone), rel=1e-4)
    for name, value in together.metrics.items():
        assert float(value) == pytest.approx(sum(float(loss.metrics[name]) for loss in alone), rel=1e-4, abs=1e-4)


def test_the_loss_of_a_row_is_the_same_each_time(algorithm: Algorithm, captured: list[Captured]) -> None:
    first = algorithm.loss(algorithm.collate(captured[:1]))
    torch.manual_seed(99)

    assert torch.equal(algorithm.loss(algorithm.collate(captured[:1])).total, first.total)


def test_every_weight_that_is_trained_learns(algorithm: Algorithm, captured: list[Captured]) -> None:
    loss = algorithm.loss(algorithm.collate(captured))
    (loss.total / loss.weight).backward()

    for name, weight in algorithm.drafter.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None, name
            assert weight.grad.abs().sum() > 0, name


def test_a_token_has_a_loss_only_if_the_target_said_it_and_the_one_before(
    algorithm: Algorithm, captured: list[Captured]
) -> None:
    one = captured[0]
    few = torch.zeros_like(one.row.mask)
    few[10:13] = True

    loss = algorithm.loss(algorithm.collate([replace(one, row=replace(one.row, mask=few))]))

    assert 1 <= loss.num_tokens <= 2


def test_hits_of_training_are_where_the_proposer_drafts_what_came(
    algorithm: Algorithm, captured: list[Captured]
) -> None:
    one = captured[1]
    ids, found = one.row.ids, algorithms.hits(algorithm, one, K)

    assert (found.shape, found.dtype, found.device.type) == ((len(ids), K), torch.bool, "cpu")
    for last in range(PROMPT, len(ids) - K):
        draft = algorithm.proposer().propose(ids[1 : last + 1], one.hidden[:last], K)
        assert [token == int(ids[last + 1 + i]) for i, token in enumerate(draft.ids)] == found[last].tolist()


def test_a_draft_is_of_at_most_k_tokens_of_the_vocabulary_with_their_logits(
    algorithm: Algorithm, captured: list[Captured], target: HfTarget
) -> None:
    one = captured[0]
    for k in range(1, K + 1):
        draft = algorithm.proposer().propose(one.row.ids[1:9], one.hidden[:8], k)

        assert len(draft.ids) == k
        assert draft.logits.shape == (k, len(target.embedding))
        assert draft.ids == draft.logits.argmax(-1).tolist()


def test_a_draft_is_the_same_whether_its_past_came_at_once_or_in_pieces(
    algorithm: Algorithm, captured: list[Captured]
) -> None:
    one, at_once, in_pieces = captured[1], algorithm.proposer(), algorithm.proposer()

    whole = at_once.propose(one.row.ids[1:13], one.hidden[:12], K)
    for start, end in ((0, 7), (7, 8), (8, 12)):
        pieces = in_pieces.propose(one.row.ids[start + 1 : end + 1], one.hidden[start:end], K)

    torch.testing.assert_close(pieces.logits, whole.logits, rtol=1e-4, atol=1e-4)


def test_an_answer_with_a_drafter_is_the_targets_own(
    algorithm: Algorithm, captured: list[Captured], target: HfTarget
) -> None:
    prompt, limits = captured[0].row.ids.tolist(), Limits(12, 1024)

    assert decode_with_drafter(target, algorithm.proposer(), prompt, limits, K).ids == decode(target, prompt, limits)


def test_a_drafter_that_was_put_into_a_folder_drafts_as_before(
    algorithm: Algorithm, captured: list[Captured], target: HfTarget, tmp_path: Path
) -> None:
    drafter.save(tmp_path / "drafter", algorithm.config, algorithm.drafter.state_dict())
    config, tensors = drafter.load(tmp_path / "drafter")
    again = type(algorithm)(config, target)  # type: ignore[call-arg]
    again.drafter.load_state_dict(tensors)

    one = captured[0]
    drafts = [a.proposer().propose(one.row.ids[1:9], one.hidden[:8], K) for a in (algorithm, again)]

    assert config == algorithm.config
    assert torch.equal(drafts[0].logits, drafts[1].logits)
