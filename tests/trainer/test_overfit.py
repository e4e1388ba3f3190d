"""The gate that all parts must pass together: a drafter that has learnt 16 answers by heart drafts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftfleet import tokens
from draftfleet.settings import load
from trainer import algorithms, targets
from trainer.algorithms.eagle3 import Eagle3
from trainer.measure import count, measure
from trainer.speculate import Limits, decode_batch
from trainer.targets import Row
from trainer.targets.hf import HfTarget

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
QUESTIONS = [
    *(f"What is {a} + {b}?" for a, b in ((3, 4), (12, 9), (40, 2))),
    *(f'Spell the word "{word}".' for word in ("lemon", "tiger", "garden")),
    *(f"What is the capital of {country}?" for country in ("Italy", "Peru", "Japan")),
    *(f"Count from {start} to {start + 12} in steps of 3." for start in (1, 20)),
    "Which day comes after Monday?",
    "Who are you?",
    "Write a Python function that returns the sum of a and b.",
    "Grace has 12 apples. Hugo gives Grace 5 more apples. How many apples does Grace have now?",
    "There are 4 boxes with 6 coins in each box. How many coins are there in total?",
]
MAX_STEPS, LR = 72, 3e-3


OPTIONS = {
    "soft_ce": {},
    "forward_kl": {"draft_vocab_size": 640, "head": "frozen", "norm_before_fc": True},
    "lk": {"style": "qwen3", "fc_norm": True, "norm_output": True},
}
"""Beside each loss, others of the options, so that each is trained with once."""


@pytest.mark.parametrize("loss", OPTIONS)
def test_a_drafter_of_16_answers_gets_more_than_three_and_a_half_tokens_from_each_pass(loss: str) -> None:
    limits = Limits(96, 1024)
    knobs: dict[str, Any] = {"loss": loss, **OPTIONS[loss]}
    settings = load(flags={"target.path": TINY} | {f"eagle3.{name}": value for name, value in knobs.items()})
    target = targets.load(settings, [2, 4, 6], torch.device("cpu"))
    assert isinstance(target, HfTarget)
    tokenizer = tokens.load(TINY)
    prompts = [tokenizer.prompt_ids([{"role": "user", "content": text}], None, True, None) for text in QUESTIONS]
    rows: list[Row] = []
    for prompt, answer in zip(prompts, decode_batch(target, prompts, limits), strict=True):
        mask = torch.tensor([False] * len(prompt) + [True] * len(answer))
        rows.append(Row(f"row-{len(rows)}", torch.tensor(prompt + answer), mask))
    torch.manual_seed(0)
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    assert isinstance(algorithm, Eagle3)
    if "draft_vocab_size" in knobs:
        counts = torch.cat([row.ids[row.mask] for row in rows]).bincount(minlength=len(target.embedding))
        algorithm.drafter.take_vocabulary(counts.topk(knobs["draft_vocab_size"]).indices.sort()[0], target)
    untrained = count(measure(algorithm, target, prompts[:2], limits=limits, k=3).answers, 3)

    optimizer = torch.optim.AdamW(
        [weight for weight in algorithm.drafter.parameters() if weight.requires_grad],
        lr=LR,
        betas=(0.9, 0.95),
        weight_decay=0,
    )
    batches = [rows[start::4] for start in range(4)]
    layouts = [algorithm.collate(captured) for captured in target.capture(batches)]
    for step in range(MAX_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 10) * min(1, 3 * (1 - step / MAX_STEPS))
        loss = algorithm.loss(layouts[step % 4])
        (loss.total / loss.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(algorithm.drafter.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    measured = measure(algorithm, target, prompts, limits=limits, k=3)
    drafts, accepted, per_position = count(measured.answers, 3)
    assert 1 + untrained[1] / untrained[0] < 1.5
    assert 1 + accepted / drafts >= 3.5, per_position
    assert [answer.ids for answer in measured.answers] == measured.plain
