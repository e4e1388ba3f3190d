"""A DFlash drafter at work: what it drafts is what it was trained to, whatever is decoded stays the target's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftfleet import tokens
from draftfleet.settings import load
from trainer import algorithms, targets
from trainer.algorithms.dflash import mask_token
from trainer.algorithms.dflash.algorithm import DFlash
from trainer.algorithms.dflash.attention import Eager
from trainer.measure import count, measure
from trainer.speculate import Limits, decode_batch
from trainer.targets import Captured, Row
from trainer.targets.hf import HfTarget

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
QUESTIONS = [
    "What is 3 + 4?",
    'Spell the word "lemon".',
    "What is the capital of Italy?",
    "Which day comes after Monday?",
]
LIMITS = Limits(64, 1024)
MAX_STEPS, LR = 60, 3e-3


@pytest.fixture(scope="module")
def target() -> Any:
    return targets.load(load(flags={"target.path": TINY}), [2, 4, 5], torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = tokens.load(TINY)
    return [tokenizer.prompt_ids([{"role": "user", "content": text}], None, True, None) for text in QUESTIONS]


@pytest.fixture(scope="module")
def rows(target: HfTarget, prompts: list[list[int]]) -> list[Row]:
    answers = decode_batch(target, prompts, LIMITS)
    return [
        Row(f"row-{n}", torch.tensor(prompt + answer), torch.tensor([False] * len(prompt) + [True] * len(answer)))
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def dflash(target: HfTarget, **knobs: Any) -> DFlash:
    chosen = {"num_layers": 2, "block_size": 8} | knobs
    flags = {f"dflash.{name}": value for name, value in chosen.items()}
    settings = load(flags={"target.path": TINY, "trainer.algorithm": "dflash", **flags})
    torch.manual_seed(0)
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    assert isinstance(algorithm, DFlash)
    return algorithm


def test_a_drafter_of_few_answers_gets_more_than_seven_tokens_from_each_pass(
    target: HfTarget, prompts: list[list[int]], rows: list[Row]
) -> None:
    algorithm = dflash(target, anchors=24)
    untrained = count(measure(algorithm, target, prompts[:2], limits=LIMITS, k=7).answers, 7)
    captured = next(target.capture([rows]))

    optimizer = torch.optim.AdamW(algorithm.drafter.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0)
    for step in range(MAX_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 6) * min(1, 3 * (1 - step / MAX_STEPS))
        epoch = [replace(one, row=replace(one.row, epoch=step)) for one in captured]
        loss = algorithm.loss(algorithm.collate(epoch))
        (loss.total / loss.weight).backward()
        torch.nn.utils.clip_grad_norm_(algorithm.drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    measured = measure(algorithm, target, prompts, limits=LIMITS, k=7)
    drafts, accepted, per_position = count(measured.answers, 7)
    assert 1 + untrained[1] / untrained[0] < 1.5
    assert 1 + accepted / drafts >= 7, per_position
    assert [answer.ids for answer in measured.answers] == measured.plain


@pytest.mark.parametrize(
    "knobs",
    [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}, {"causal": True}],
    ids=["full", "sliding", "causal"],
)
def test_what_is_drafted_piece_by_piece_is_what_the_training_code_predicts(
    target: HfTarget, rows: list[Row], knobs: dict[str, Any]
) -> None:
    algorithm, row = dflash(target, **knobs), rows[1]
    captured = next(target.capture([[row]]))[0]
    proposer = algorithm.proposer()
    start = int(row.mask.nonzero()[0])

    seen, pieces = 0, [start, 1, 3, 8]
    for piece in pieces:
        new = slice(seen, seen + piece)
        seen += piece
        draft = proposer.propose(row.ids[new.start + 1 : new.stop + 1], captured.hidden[new], 7)

        expected = trained_logits(algorithm, captured, anchor=seen)
        torch.testing.assert_close(draft.logits, expected, rtol=1e-4, atol=1e-4)
        assert draft.ids == expected.argmax(-1).tolist()
        assert draft.logits.shape == (7, len(target.embedding))


def trained_logits(algorithm: DFlash, captured: Captured, anchor: int) -> Tensor:
    """(B - 1, V) of the block at this anchor."""
    alone = torch.zeros_like(captured.row.mask)
    alone[anchor : anchor + 2] = True
    layout = algorithm.collate([replace(captured, row=replace(captured.row, mask=alone))])
    assert layout is not None
    context = algorithm.drafter.context(layout.hidden, layout.context_positions)
    states = algorithm.drafter(context, algorithm.embed(layout.anchor_ids), layout.positions, Eager(layout.chunks))
    return algorithm.logits(states[0]).detach()


def test_a_draft_has_at_most_the_tokens_of_a_block_and_each_is_chosen_from_its_logits(
    target: HfTarget, rows: list[Row]
) -> None:
    algorithm, row = dflash(target, block_size=5), rows[0]
    hidden = next(target.capture([[row]]))[0].hidden
    asked: list[Tensor] = []

    def second_best(logits: Tensor) -> Tensor:
        asked.append(logits)
        return logits.topk(2, dim=-1).indices[:, 1]

    lengths: dict[int, int] = {}
    for k in (0, 1, 3, 4, 9):
        draft = algorithm.proposer().propose(row.ids[1:21], hidden[:20], k, second_best)
        lengths[k] = len(draft.ids)
        assert draft.logits.shape == (len(draft.ids), len(target.embedding))
        assert draft.ids == [int(logits.topk(2).indices[1]) for logits in draft.logits]

    assert lengths == {0: 0, 1: 1, 3: 3, 4: 4, 9: 4}
    assert sum(map(len, asked)) == 12


class Tokenizer:
    """As much of one as choosing a mask token needs."""

    def __init__(self, added: dict[int, str], size: int, mask: int | None = None, pad: int | None = None) -> None:
        self.added_tokens_decoder = {number: Named(text) for number, text in added.items()}
        self.mask_token_id, self.pad_token_id = mask, pad
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self._size)}


class Named:
    def __init__(self, content: str) -> None:
        self.content = content


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Tokenizer({0: "<pad>", 7: "<mask>"}, 20, mask=7), 7),
        (Tokenizer({0: "<pad>", 5: "<|im_end|>", 6: "<|fim_pad|>"}, 20, pad=0), 6),
        (Tokenizer({3: "<|reserved_special_token_0|>", 4: "<|reserved_special_token_1|>"}, 20), 4),  # 3 is all zeros
        (Tokenizer({5: "<|im_end|>"}, 20, pad=0), 20),
        (Tokenizer({5: "<|im_end|>"}, 24, pad=0), 0),
    ],
)
def test_the_mask_token_is_a_spare_one_whose_embedding_was_trained(
    tokenizer: Tokenizer, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    embedding[3] = 0
    monkeypatch.setattr(mask_token, "_tokenizer", lambda _: tokenizer)

    assert mask_token.choose(None, "anywhere", embedding) == expected
    assert mask_token.choose(11, "anywhere", embedding) == 11


def test_the_tiny_target_spares_its_padding_token(target: HfTarget) -> None:
    assert dflash(target).config.mask_token_id == 0
