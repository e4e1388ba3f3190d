"""What every target keeps, whatever runs the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from draftfleet.errors import TargetError
from trainer.targets import Captured, Row, Target

LAYERS = [2, 3, 6]


@pytest.fixture(params=["hf", "hf_dispatched", "cache", "cache_filled"])
def target(request: pytest.FixtureRequest) -> Target:
    return request.getfixturevalue(request.param)


@pytest.fixture
def batches(rows: Callable[..., list[Row]]) -> list[list[Row]]:
    return [rows(5, 70, 33, 1), rows(12, 40, seed=1), rows(9, seed=2)]


@pytest.fixture
def expected(reference: Qwen3ForCausalLM) -> Callable[[Tensor], Any]:
    """What Hugging Face says of a row alone."""

    def say(ids: Tensor) -> Any:
        with torch.no_grad():
            return reference(ids[None], output_hidden_states=True)

    return say


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def assert_same(ours: list[list[Captured]], theirs: list[list[Captured]]) -> None:
    for one, other in zip([c for b in ours for c in b], [c for b in theirs for c in b], strict=True):
        assert one.row.key == other.row.key
        assert_close(one.hidden, other.hidden)
        assert_close(one.last, other.last)


def test_batch_for_batch_and_row_for_row_come_as_they_were_asked(target: Target, batches: list[list[Row]]) -> None:
    captured = list(target.capture(iter(batches)))

    assert [[one.row for one in batch] for batch in captured] == batches
    for one in [one for batch in captured for one in batch]:
        assert one.hidden.shape == (len(one.row.ids), len(LAYERS) * 192)
        assert one.last.shape == (len(one.row.ids), 192)


def test_states_are_the_outputs_of_the_layers_asked_for_side_by_side(
    target: Target, batches: list[list[Row]], expected: Callable[[Tensor], Any]
) -> None:
    assert target.layers == LAYERS
    for one in [one for batch in target.capture(batches) for one in batch]:
        states = expected(one.row.ids).hidden_states
        assert_close(one.hidden, torch.cat([states[layer + 1][0] for layer in LAYERS], -1))


def test_the_last_state_has_not_passed_the_final_norm(
    target: Target, batches: list[list[Row]], expected: Callable[[Tensor], Any], reference: Any
) -> None:
    one = next(iter(target.capture(batches)))[1]

    theirs = expected(one.row.ids)

    assert_close(reference.model.norm(one.last), theirs.hidden_states[-1][0])
    assert (one.last - theirs.hidden_states[-1][0]).abs().max() > 0.1
    assert_close(target.logits(one.last), theirs.logits[0])


def test_embedding_head_and_scale_of_the_norm_are_the_models_own(target: Target, reference: Any) -> None:
    assert torch.equal(target.embedding, reference.get_input_embeddings().weight)
    assert torch.equal(target.head, reference.get_output_embeddings().weight)
    assert_close(target.norm_scale, reference.model.norm.weight)
    assert target.config.num_hidden_layers == 8
    assert target.config.hidden_size == 192


def test_states_are_of_the_targets_dtype_and_device_and_carry_no_gradient(
    target: Target, batches: list[list[Row]]
) -> None:
    one = next(iter(target.capture(batches)))[0]

    assert one.hidden.dtype == one.last.dtype == target.embedding.dtype == torch.float32
    assert one.hidden.device == one.last.device == target.device == target.embedding.device
    assert not any(tensor.requires_grad for tensor in (one.hidden, one.last, target.embedding, target.head))
    assert target.logits(one.last).dtype == torch.float32


@pytest.mark.parametrize("wrong", [2048, -1])
def test_ids_outside_the_vocabulary_are_refused_by_the_samples_name(target: Target, wrong: int) -> None:
    bad = Row("abc-0-0", torch.tensor([5, wrong, 6]), torch.tensor([False, True, True]))

    with pytest.raises(TargetError, match=r"abc-0-0 has token ids from .*vocabulary of 2048"):
        list(target.capture([[bad]]))


def test_no_batch_gives_none_and_an_empty_one_an_empty_one(
    target: Target, batches: list[list[Row]], rows: Callable[..., list[Row]]
) -> None:
    assert list(target.capture([])) == []

    captured = list(target.capture([[], batches[0], [], rows(17, seed=3)]))

    assert [len(batch) for batch in captured] == [0, 4, 0, 1]


def test_how_far_it_reads_ahead_changes_nothing(target: Target, batches: list[list[Row]]) -> None:
    drawn: list[int] = []

    def drawing() -> Iterator[list[Row]]:
        for number, batch in enumerate(batches):
            drawn.append(number)
            yield batch

    one_by_one = [next(iter(target.capture([batch]))) for batch in batches]
    slowly = list(target.capture(drawing()))

    assert drawn == [0, 1, 2]
    assert_same(slowly, one_by_one)


def test_one_that_was_left_in_the_middle_begins_anew(target: Target, batches: list[list[Row]]) -> None:
    left = iter(target.capture(batches))
    first = next(left)
    del left

    again = list(target.capture(batches))

    assert_same(again[:1], [first])
    assert len(again) == 3
