"""How a draft is verified: greedily, or so that what comes out has the target's own distribution.

With p the target's distribution after what is known so far, and q the one that a drafted token d was drawn from:

    d is kept with probability min(1, p(d) / q(d))
    the first that is not is replaced by a draw from (p - q)+, normed; nothing after it is kept
    where all are kept, one more is drawn from p: the bonus token

(Leviathan et al., arXiv 2211.17192, appendix A.1.) q must be what d really came from, given the drafted tokens before
it: for a drafter that is sampled, its own softmax, whether a slot saw the slots before it (EAGLE-3) or not (DFlash);
for one that drafts its best token, all of the weight on that token, so d is kept with probability p(d).
"""

# V vocabulary, n drafted tokens

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.algorithms import Draft


class Verdict(NamedTuple):
    """How much of a draft is kept, and the target's own token after it. `chances` (n,): of being kept up to each."""

    accepted: int
    token: int
    chances: list[float]


class Rule(Protocol):
    """For one answer."""

    def choose(self, logits: Tensor) -> Tensor:
        """Draft a token from each row of a drafter's logits: (m, V) -> (m,)."""
        ...

    def verify(self, draft: Draft, logits: Tensor) -> Verdict:
        """`logits` (n + 1, V) are the target's: where it predicts each drafted token, and after the last."""
        ...


class Greedy:
    """The target's best token, always."""

    def choose(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def verify(self, draft: Draft, logits: Tensor) -> Verdict:
        best: list[int] = logits.argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(draft.ids) if token != best[i]), len(draft.ids))
        return Verdict(accepted, best[accepted], [float(i < accepted) for i in range(len(draft.ids))])


class Sampled:
    """Rejection sampling. The draws depend on the seed alone."""

    def __init__(self, temperature: float, seed: int, device: torch.device, *, greedy_drafts: bool = False) -> None:
        assert temperature > 0, f"temperature {temperature}"
        self._temperature = temperature
        self._greedy_drafts = greedy_drafts
        self._dice = torch.Generator(device).manual_seed(seed)

    def choose(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1) if self._greedy_drafts else self._draw(self._softmax(logits))

    def verify(self, draft: Draft, logits: Tensor) -> Verdict:
        p, q = self._softmax(logits), self._drawn_from(draft)
        chances = list(_chances(draft.ids, p, q))
        lots: list[float] = torch.rand(
            len(draft.ids), generator=self._dice, device=p.device, dtype=torch.float64
        ).tolist()
        for i, (token, lot) in enumerate(zip(draft.ids, lots, strict=True)):
            if lot * float(q[i, token]) >= float(p[i, token]):
                return Verdict(i, self._draw_one(self._rest(p[i], q[i])), chances)
        return Verdict(len(draft.ids), self._draw_one(p[-1]), chances)

    def _rest(self, p: Tensor, q: Tensor) -> Tensor:
        """What the draft leaves of the target's distribution, not normed: (V,)"""
        rest = (p - q).clamp(min=0)
        return rest if float(rest.sum()) > 0 else p  # p = q but for rounding

    def _drawn_from(self, draft: Draft) -> Tensor:
        """(n, V)"""
        if not self._greedy_drafts:
            return self._softmax(draft.logits)
        ids = torch.tensor(draft.ids, dtype=torch.int64, device=draft.logits.device)
        return torch.zeros_like(draft.logits, dtype=torch.float64).scatter_(-1, ids[:, None], 1.0)

    def _softmax(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.double() / self._temperature, dim=-1)

    def _draw(self, weights: Tensor) -> Tensor:
        return torch.multinomial(weights, 1, generator=self._dice)[:, 0]

    def _draw_one(self, weights: Tensor) -> int:
        return int(self._draw(weights[None]))


def _chances(ids: list[int], p: Tensor, q: Tensor) -> Iterator[float]:
    """Of being kept up to each position, before it is known which token is drafted there: the chance of getting there,
    times sum min(p, q). Their expectation is that of what is kept, with less noise."""
    reached = 1.0
    for i, token in enumerate(ids):
        yield reached * float(torch.minimum(p[i], q[i]).sum())
        reached *= min(1.0, float(p[i, token] / q[i, token]))


GREEDY = Greedy()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: at temperature 0 the best. `greedy_drafts`: the drafter drafts its best at any."""

    temperature: float = 0.0
    greedy_drafts: bool = False
    seed: int = 0

    def rule(self, prompt: list[int], device: torch.device) -> Rule:
        """The rule for the answer to this prompt, with dice of its own: which other prompts there are does not
        matter."""
        if self.temperature == 0:
            return GREEDY
        name = f"{self.seed} {prompt}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest())
        return Sampled(self.temperature, seed, device, greedy_drafts=self.greedy_drafts)
