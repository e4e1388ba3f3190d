"""The training code beside the drafting code: they say the same of the same drafts, and an alarm says where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftfleet import tokens
from draftfleet.settings import load
from trainer import algorithms, targets
from trainer.algorithms import Algorithm, Choose, Draft, Proposer, greedy
from trainer.evaluation.asking import Asked
from trainer.evaluation.forced import TeacherForced, alarm, compare, compared, overfit
from trainer.measure import measure
from trainer.speculate import Answer, Limits, decode_batch
from trainer.targets import Row
from trainer.targets.hf import HfTarget

TINY = str(Path(__file__).parents[3] / "examples" / "tiny-target")
QUESTIONS = [
    "What is 3 + 4?",
    'Spell the word "lemon".',
    "Which day comes after Monday?",
    "Who are you?",
    "What is 12 + 9?",
]
LIMITS = Limits(24, 1024)


@pytest.fixture(scope="module")
def target() -> HfTarget:
    loaded = targets.load(load(flags={"target.path": TINY}), [2, 4, 5], torch.device("cpu"))
    assert isinstance(loaded, HfTarget)
    return loaded


def made(target: HfTarget, algorithm: str, **knobs: Any) -> Algorithm:
    flags = {"dflash.num_layers": 2, "dflash.block_size": 8, "trainer.ttt_steps": 4} | knobs
    settings = load(flags={"target.path": TINY, "trainer.algorithm": algorithm, **flags})
    torch.manual_seed(0)
    return algorithms.build(algorithms.configure(settings, target), target)


def row_of(ids: list[int], num_prompt: int, name: str = "row") -> Row:
    return Row(name, torch.tensor(ids), torch.arange(len(ids)) >= num_prompt)


@pytest.mark.parametrize(
    ("algorithm", "knobs"),
    [
        ("eagle3", {}),
        ("eagle3", {"eagle3.norm_output": True, "eagle3.draft_vocab_size": 100}),
        ("dflash", {}),
        ("dflash", {"dflash.causal": True}),
    ],
    ids=["eagle3", "eagle3 reduced", "dflash", "dflash causal"],
)
@pytest.mark.parametrize("k", [2, 4])
def test_training_code_hits_what_is_drafted(target: HfTarget, algorithm: str, knobs: dict[str, Any], k: int) -> None:
    """A row is put together from drafts of the drafter, each followed by a token that it would not have drafted."""
    drafter = made(target, algorithm, **knobs)
    prompt = tokens.load(TINY).prompt_ids([{"role": "user", "content": "Who are you?"}], None, True, None)
    ids, starts = [*prompt, 11], list[int]()
    for _ in range(4):
        hidden = target.forward(torch.tensor([ids]))[0][0]
        draft = drafter.proposer().propose(torch.tensor(ids[1:]), hidden[: len(ids) - 1], k).ids
        starts.append(len(ids) - 1)
        ids += [*draft[:-1], (draft[-1] + 1) % 2048, 12]

    captured = next(target.capture([[row_of(ids, len(prompt))]]))[0]
    found = algorithms.hits(drafter, captured, k)

    assert found.shape == (len(ids), k)
    assert found[starts].tolist() == [[True] * (k - 1) + [False]] * 4


def test_there_are_no_more_hits_of_a_draft_than_steps_were_trained(target: HfTarget) -> None:
    captured = next(target.capture([[row_of(list(range(20, 60)), 10)]]))[0]

    assert algorithms.hits(made(target, "eagle3"), captured, 9).shape == (40, 4)
    assert algorithms.hits(made(target, "dflash"), captured, 9).shape == (40, 7)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_row_with_nothing_to_learn_has_no_hit(target: HfTarget, algorithm: str) -> None:
    captured = next(target.capture([[row_of(list(range(20, 30)), 9)]]))[0]

    assert not algorithms.hits(made(target, algorithm), captured, 3).any()


class Shifted:
    """Fed the states of the token before, as a server does that counts from one."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def propose(self, ids: Tensor, hidden: Tensor, k: int, choose: Choose = greedy) -> Draft:
        return self._proposer.propose(ids, hidden.roll(1, 0) if len(ids) > 1 else hidden * 0.5, k, choose)


def test_an_alarm_is_raised_if_drafting_differs_from_training_and_only_then(
    target: HfTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter: Any = made(target, "eagle3", **{"trainer.ttt_steps": 3})
    tokenizer = tokens.load(TINY)
    prompts = [tokenizer.prompt_ids([{"role": "user", "content": text}], None, True, None) for text in QUESTIONS]
    answers = decode_batch(target, prompts, LIMITS)
    rows = [row_of(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
    layout = drafter.collate(next(target.capture([rows])))
    optimizer = torch.optim.AdamW(drafter.drafter.parameters(), lr=3e-3, weight_decay=0)
    for _ in range(20):
        loss = drafter.loss(layout)
        (loss.total / loss.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(drafter.drafter.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    asked = [Asked(prompt, f"c{number}") for number, prompt in enumerate(prompts)]

    def judged() -> TeacherForced:
        return compare(drafter, target, asked, measure(drafter, target, prompts, limits=LIMITS, k=3).answers, k=3)

    healthy = judged()
    proposer = drafter.proposer
    monkeypatch.setattr(drafter, "proposer", lambda: Shifted(proposer()))
    faulty = judged()

    assert healthy.real_acceptance_length > 1.8
    assert abs(healthy.gap) < 0.02
    assert alarm(healthy) is None
    assert faulty.gap > 0.5
    assert "a gap of +" in (alarm(faulty) or "")
    logged = drafter.loss(layout)
    accuracy = float(logged.metrics["accuracy_0"]) / logged.num_tokens
    assert healthy.accuracy_per_position[0] == pytest.approx(accuracy, abs=0.01)


def counted(accepted: list[int], hits: list[list[bool]], ids: int = 9, drafted: int = 2) -> TeacherForced:
    """Two conversations with the same prompt of three tokens, the same drafts and hits."""
    starts = [1]
    for kept in accepted[:-1]:
        starts.append(starts[-1] + kept + 1)
    answer = Answer([5] * ids, [drafted] * len(accepted), accepted, starts, [])
    table = torch.zeros(3 + ids, 2, dtype=torch.bool)
    for start, row in zip(starts, hits, strict=True):
        table[3 + start - 1] = torch.tensor(row)
    asked = [Asked([1, 2, 3], name) for name in ("a", "b")]
    return compared(asked, [answer, answer], [table, table])


def test_drafts_are_compared_up_to_their_first_miss_and_to_the_end_of_the_answer() -> None:
    same = counted([2, 0, 1], [[True, True], [False, True], [True, False]])
    assert (same.drafts, same.acceptance_length, same.real_acceptance_length, same.gap) == (6, 2, 2, 0)
    assert not same.is_alarming

    past_the_end = counted([2, 2], [[True, True], [True, False]], ids=5)  # of the second draft, one token is known
    assert (past_the_end.gap, past_the_end.acceptance_length) == (0, 2.5)

    shorter = counted([1, 1], [[True, True], [True, True]], drafted=1)  # another block, which training never saw
    assert (shorter.drafts, shorter.is_alarming) == (0, False)

    worse = counted([0, 0, 0], [[True, True]] * 3)
    assert (worse.gap, worse.is_alarming) == (2, True)


def test_one_conversation_raises_no_alarm() -> None:
    table = torch.ones(8, 2, dtype=torch.bool)

    alone = compared([Asked([1, 2, 3], "a")], [Answer([5] * 5, [2], [0], [1], [])], [table])

    assert (alone.gap, alone.tolerance, alone.is_alarming) == (2, None, False)


def test_a_drafter_that_knows_only_its_own_rows_is_told() -> None:
    found = counted([0, 0, 0, 0], [[False, False]] * 4)

    assert "right 90% of the time in training and 0%" in (overfit(found, [0.9, 0.8]) or "")
    assert overfit(found, [0.25, 0.2]) is None
    assert overfit(found, None) is None
