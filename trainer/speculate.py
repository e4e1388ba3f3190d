"""Decoding of the target, plain and with a drafter: the second takes fewer passes. Greedily both give the same tokens,
and sampled (trainer.evaluation.rules) tokens of the same distribution."""

# T tokens, K chosen layers, D hidden size of the target, k drafted tokens

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.algorithms import Draft, Proposer
from trainer.evaluation.rules import GREEDY, Rule

if TYPE_CHECKING:
    from trainer.targets.hf import HfTarget


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an answer ends, besides a stop token of the target."""

    max_tokens: int
    context_tokens: int

    def of(self, prompt: list[int]) -> int:
        """The longest answer to this prompt."""
        return min(self.max_tokens, self.context_tokens - len(prompt))


@dataclass(frozen=True, slots=True)
class Answer:
    """`accepted` has one number for each pass of the target that verified a draft: how much of the draft it kept.

    Of the same passes `starts` are the tokens of the answer that were known by then, and `chances` what the rule said
    of each position.
    """

    ids: list[int]
    drafted: list[int]
    accepted: list[int]
    starts: list[int] = field(default_factory=list[int])
    chances: list[list[float]] = field(default_factory=list[list[float]])


@torch.no_grad()
def decode(target: HfTarget, prompt: list[int], limits: Limits, rule: Rule = GREEDY) -> list[int]:
    """Plain decoding of one prompt."""
    cache = target.new_cache()
    answer: list[int] = []
    ids = prompt
    while len(answer) < limits.of(prompt):
        _, last = target.forward(_tensor(ids, target), cache)
        answer.append(rule.verify(_none(last), target.logits(last[0, -1:])).token)
        ids = answer[-1:]
        if answer[-1] in target.eos_token_ids:
            break
    return answer


@torch.no_grad()
def decode_batch(target: HfTarget, prompts: list[list[int]], limits: Limits) -> list[list[int]]:
    """Plain greedy decoding of many prompts at once, padded on the left.

    Sums in another order than `decode` does, so where two tokens are all but equally likely it may take the other.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=target.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = target.new_cache()
    answers: list[list[int]] = [[] for _ in prompts]
    going = {index for index, prompt in enumerate(prompts) if limits.of(prompt) > 0}
    while going:
        _, last = target.forward(ids, cache, attention_mask=mask, position_ids=positions)
        chosen = _best(target, last[:, -1])
        for index in list(going):
            answers[index].append(chosen[index])
            if chosen[index] in target.eos_token_ids or len(answers[index]) == limits.of(prompts[index]):
                going.remove(index)
        ids = torch.tensor(chosen, device=target.device)[:, None]
        mask = torch.cat((mask, torch.ones_like(ids)), dim=-1)
        positions = positions[:, -1:] + 1
    return answers


@torch.no_grad()
def decode_with_drafter(  # noqa: PLR0917  # the last is rarely given
    target: HfTarget, proposer: Proposer, prompt: list[int], limits: Limits, k: int, rule: Rule = GREEDY
) -> Answer:
    """Draft k tokens, verify them in one pass of the target, keep what the rule keeps and the target's own next token.

    With answer token x5 known and drafted d6 d7 d8, the pass runs x5 d6 d7 d8 and yields y6 y7 y8 y9. If d6 = y6 and
    d7 /= y7, then d6 and y7 are kept, one draft is accepted, and the cache is cropped to end with d6.
    """
    cache = target.new_cache()
    longest = limits.of(prompt)
    ids, answer = prompt, Answer([], [], [])
    draft: Draft | None = None
    while len(answer.ids) < longest:
        drafted = draft.ids if draft else []
        hidden, last = target.forward(_tensor(ids + drafted, target), cache)
        verdict = rule.verify(draft or _none(last), target.logits(last[0, -len(drafted) - 1 :]))
        accepted = verdict.accepted
        if drafted:
            answer.starts.append(len(answer.ids))
            answer.drafted.append(len(drafted))
            answer.accepted.append(accepted)
            answer.chances.append(verdict.chances)
            cache.crop(accepted - len(drafted))
        kept = [*drafted[:accepted], verdict.token]
        answer.ids.extend(kept)
        if not target.eos_token_ids.isdisjoint(kept):
            break
        # The states that are new and stay: those of the prompt, or of the last token and the accepted drafts.
        new = len(ids) + accepted
        after = (ids + drafted)[1:new] + kept[-1:]
        room = limits.context_tokens - len(prompt) - len(answer.ids)
        ids = kept[-1:]
        draft = (
            proposer.propose(_tensor(after, target)[0], hidden[0, :new], min(k, room), rule.choose)
            if room > 0
            else None
        )
    return Answer(_cut(answer.ids[:longest], target), answer.drafted, answer.accepted, answer.starts, answer.chances)


def _best(target: HfTarget, last: Tensor) -> list[int]:
    return target.logits(last).argmax(-1).tolist()


def _none(last: Tensor) -> Draft:
    """A draft of no token."""
    return Draft([], last.new_empty(0, 0))


def _tensor(ids: list[int], target: HfTarget) -> Tensor:
    return torch.tensor([ids], device=target.device)


def _cut(ids: list[int], target: HfTarget) -> list[int]:
    """Up to and with the first stop token."""
    end = next((index for index, token in enumerate(ids) if token in target.eos_token_ids), len(ids) - 1)
    return ids[: end + 1]
