"""Sampled draft-and-verify has the target's own distribution: counted over thousands of answers, held against what the
target says, by a G-test. A rule that is wrong in one line fails the same test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftfleet import tokens
from draftfleet.settings import load
from trainer import algorithms, targets
from trainer.algorithms import Choose, Draft, greedy
from trainer.evaluation.rules import Sampled
from trainer.speculate import Limits, decode, decode_with_drafter
from trainer.targets.hf import HfTarget

TINY = str(Path(__file__).parents[3] / "examples" / "tiny-target")
CPU = torch.device("cpu")
UNLIKELY = 1e-4
"""How seldom a right rule would be refused, were the seeds not fixed."""


def surprise(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The chance of counts at least as far from `expected` (what is missing from 1 is one more outcome), by the G-test.

    Outcomes that are expected fewer than five times are taken together.
    """
    number = sum(seen.values())
    cells: list[tuple[float, float]] = []
    rest_seen, rest_expected = float(number), float(number)
    for outcome, chance in expected.items():
        if chance * number >= 5:
            cells.append((seen[outcome], chance * number))
            rest_seen -= seen[outcome]
            rest_expected -= chance * number
    if rest_expected >= 5:
        cells.append((rest_seen, rest_expected))
    else:
        assert rest_seen < 25, f"{rest_seen} answers that have a chance of {rest_expected / number:.1e}"
    g = 2 * sum(there * math.log(there / wanted) for there, wanted in cells if there)
    half = torch.tensor([(len(cells) - 1) / 2, g / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


# A vocabulary of five tokens, whose next token depends on the last two.

V = 5


class Table:
    """As much of a target as decoding needs: its states are the last two tokens, its logits stand in a table."""

    device = CPU
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.table = torch.randn(V, V, V, generator=torch.Generator().manual_seed(1)) * 1.5

    def new_cache(self) -> Any:
        held: list[int] = []
        return SimpleNamespace(held=held, crop=lambda less: held.__delitem__(slice(len(held) + less, None)))

    def forward(self, ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        before = len(cache.held)
        cache.held.extend(ids[0].tolist())
        pairs = [(cache.held[at - 1] if at else 0, cache.held[at]) for at in range(before, len(cache.held))]
        last = torch.tensor([pairs])
        return last, last

    def logits(self, last: Tensor) -> Tensor:
        return self.table[last[:, 0], last[:, 1]]

    def expected(self, prompt: list[int], length: int, temperature: float) -> dict[tuple[int, ...], float]:
        """The chance of each answer of so many tokens."""
        p = torch.softmax(self.table.double() / temperature, dim=-1)
        found: dict[tuple[int, ...], float] = {}
        for answer in product(range(V), repeat=length):
            known = [*prompt, *answer]
            chances = [float(p[known[at - 2], known[at - 1], known[at]]) for at in range(len(prompt), len(known))]
            found[answer] = math.prod(chances)
        return found


class Chain:
    """Drafts as EAGLE-3 does: each token after the one before, from a table that is not quite the target's. `tokens`
    alone can be drafted."""

    def __init__(self, target: Table, can_draft: list[int]) -> None:
        noise = torch.randn(V, V, V, generator=torch.Generator().manual_seed(2))
        cannot = torch.tensor([token not in can_draft for token in range(V)])
        self._table = (target.table + noise).masked_fill(cannot, -torch.inf)

    def propose(self, ids: Tensor, hidden: Tensor, k: int, choose: Choose = greedy) -> Draft:
        before, last = int(hidden[-1, 1]), int(ids[-1])
        drafted: list[int] = []
        rows: list[Tensor] = []
        for _ in range(k):
            rows.append(self._table[before, last][None])
            before, last = last, int(choose(rows[-1]))
            drafted.append(last)
        return Draft(drafted, torch.cat(rows))


class Block:
    """Drafts as DFlash does: all slots at once, none knowing what another holds."""

    def __init__(self, target: Table) -> None:
        self._table = target.table.mean(0)

    def propose(self, ids: Tensor, hidden: Tensor, k: int, choose: Choose = greedy) -> Draft:
        logits = self._table[int(ids[-1])].expand(k, V) * torch.linspace(1, 0.3, k)[:, None]
        return Draft(choose(logits).tolist(), logits)


def proposers(target: Table) -> dict[str, Any]:
    return {"chain": Chain(target, list(range(V))), "reduced": Chain(target, [0, 2, 3]), "block": Block(target)}


def answers(target: Table, proposer: Any, *, greedy_drafts: bool, num: int = 3000) -> Iterator[tuple[int, ...]]:
    """The first three tokens: the target's own, and what a draft of three and its verification make of the next."""
    for seed in range(num):
        rule = Sampled(0.8, seed, CPU, greedy_drafts=greedy_drafts)
        yield tuple(decode_with_drafter(target, proposer, [1, 2], Limits(3, 100), 3, rule).ids)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("greedy_drafts", [False, True], ids=["sampled", "best"])
@pytest.mark.parametrize("drafting", ["chain", "reduced", "block"])
def test_answers_have_the_distribution_of_the_target(drafting: str, greedy_drafts: bool) -> None:
    target = Table()

    seen = Counter(answers(target, proposers(target)[drafting], greedy_drafts=greedy_drafts))

    assert surprise(seen, target.expected([1, 2], 3, 0.8)) > UNLIKELY


def no_residual(self: Sampled, p: Tensor, q: Tensor) -> Tensor:
    return p


def not_drawn_from(self: Sampled, draft: Draft) -> Tensor:
    """The drafter's softmax at another temperature than it was drawn at."""
    return torch.softmax(draft.logits.double() / 4, dim=-1)


def best(self: Sampled, logits: Tensor) -> Tensor:
    """Not drawn, while the rule believes that it was."""
    return logits.argmax(-1)


WRONG = {"_rest": no_residual, "_drawn_from": not_drawn_from, "choose": best}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("drafting", ["chain", "reduced", "block"])
def test_a_wrong_rule_is_found(drafting: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Table()
    monkeypatch.setattr(Sampled, name, WRONG[name])

    seen = Counter(answers(target, proposers(target)[drafting], greedy_drafts=False))

    assert surprise(seen, target.expected([1, 2], 3, 0.8)) < UNLIKELY / 100


def test_plain_sampling_has_the_distribution_of_the_target() -> None:
    target = Table()

    seen = Counter(
        tuple(decode(target, [1, 2], Limits(2, 100), Sampled(0.8, seed, CPU)))  # pyright: ignore[reportArgumentType]
        for seed in range(3000)
    )

    assert surprise(seen, target.expected([1, 2], 2, 0.8)) > UNLIKELY


# The tiny target, with drafters that were never trained but that draft what is likely.


class Remembered:
    """The tiny target and a drafter of it that drafts one token, with what they once computed."""

    eos_token_ids: frozenset[int] = frozenset()
    device = CPU

    def __init__(self, target: HfTarget, algorithm: Any) -> None:
        self._target, self._algorithm = target, algorithm
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._drafts: dict[int, Tensor] = {}

    def new_cache(self) -> Any:
        held: list[int] = []
        return SimpleNamespace(held=held, crop=lambda less: held.__delitem__(slice(len(held) + less, None)))

    def forward(self, ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        cache.held.extend(ids[0].tolist())
        key, new = tuple(cache.held), ids.shape[1]
        if key not in self._known:
            hidden, last = self._target.forward(torch.tensor([cache.held]))
            self._known[key] = hidden, self._target.logits(last)
        hidden, logits = self._known[key]
        return hidden[:, -new:], logits[:, -new:]

    def logits(self, last: Tensor) -> Tensor:
        return last

    def propose(self, ids: Tensor, hidden: Tensor, k: int, choose: Choose = greedy) -> Draft:
        """The logits depend on the first token of the answer alone."""
        first = int(ids[-1])
        if first not in self._drafts:
            self._drafts[first] = self._algorithm.proposer().propose(ids, hidden, 1).logits
        logits = self._drafts[first]
        return Draft(choose(logits).tolist(), logits)


def drafter(algorithm: str, target: HfTarget, prompt: list[int]) -> Any:
    """EAGLE-3 with a vocabulary of what is likely after what is likely; DFlash, whose head is the target's, made to
    prefer it. Neither is as sure of itself as an untrained one would be, so that what it drafts has a chance."""
    first = target.logits(target.forward(torch.tensor([prompt]))[1][0, -1]).topk(3).indices
    after = torch.cat((torch.tensor([prompt]).expand(3, -1), first[:, None]), dim=1)
    best = target.logits(target.forward(after)[1][:, -1]).topk(2).indices
    ids = best.flatten().unique()
    flags = {"trainer.algorithm": algorithm, "dflash.num_layers": 1, "dflash.block_size": 4}
    settings = load(flags={"target.path": TINY, "eagle3.draft_vocab_size": len(ids), **flags})
    torch.manual_seed(0)
    made: Any = algorithms.build(algorithms.configure(settings, target), target)
    if algorithm == "eagle3":
        made.drafter.take_vocabulary(ids, target)
        made.drafter.lm_head.weight.data.mul_(0.1)
    else:
        prefer = torch.full((len(target.embedding),), -20.0).index_fill(0, ids, 0.0)
        prefer[best[0, 0]] = 2.0
        made.logits = lambda states: 0.1 * type(made).logits(made, states) + prefer
    return made


@pytest.fixture(scope="module")
def target() -> HfTarget:
    loaded = targets.load(load(flags={"target.path": TINY}), [2, 4, 5], CPU)
    assert isinstance(loaded, HfTarget)
    return loaded


@pytest.mark.parametrize(
    ("algorithm", "greedy_drafts"),
    [("eagle3", False), ("dflash", False), ("dflash", True)],
    ids=["eagle3", "dflash", "dflash drafting its best"],
)
def test_drafters_of_the_tiny_target_change_no_distribution(
    target: HfTarget, algorithm: str, greedy_drafts: bool
) -> None:
    prompt = tokens.load(TINY).prompt_ids([{"role": "user", "content": "Who are you?"}], None, True, None)[-8:]
    remembered: Any = Remembered(target, drafter(algorithm, target, prompt))
    temperature = 1.5

    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(800):
        rule = Sampled(temperature, seed, CPU, greedy_drafts=greedy_drafts)
        answer = decode_with_drafter(remembered, remembered, prompt, Limits(2, 100), 1, rule)
        seen[tuple(answer.ids)] += 1
        accepted += sum(answer.accepted)

    def after(*known: int) -> Tensor:
        last = target.forward(torch.tensor([[*prompt, *known]]))[1][0, -1]
        return torch.softmax(target.logits(last).double() / temperature, -1)

    first = after()
    expected: dict[tuple[int, ...], float] = {}
    for token in first.topk(20).indices.tolist():
        second = after(token)
        expected |= {(token, then): float(first[token] * second[then]) for then in second.topk(20).indices.tolist()}
    assert accepted > 80  # else nothing was put to the test
    assert surprise(seen, expected) > UNLIKELY
