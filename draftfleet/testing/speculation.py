"""What became of the drafts of a server that plays to have a drafter: counts alone, which cost an answer no time."""

from __future__ import annotations

from dataclasses import dataclass, field

GOLDEN = 0.6180339887498949
"""Its multiples, without their whole part, fill the unit interval evenly: shares come out exact without chance."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Of one answer: passes that verified a draft, and how many of them kept 0, 1, 2, ... tokens."""

    passes: int
    histogram: list[int]

    @property
    def correct(self) -> int:
        return sum(kept * count for kept, count in enumerate(self.histogram))


@dataclass(slots=True)
class Drafts:
    """Since the server started. `answered` counts requests, also of a server that does not draft."""

    answered: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list[int])

    def answer(self, tokens: int, draft_tokens: int | None, keep: float) -> Verified | None:
        """An answer of so many tokens: the first comes of the prompt's pass, the others of passes that keep a token
        with chance `keep` if they kept those before it. As in vLLM, what is kept past the end counts."""
        self.answered += 1
        if draft_tokens is None:
            return None
        self.per_position += [0] * (draft_tokens - len(self.per_position))
        histogram = [0] * (draft_tokens + 1)
        left = tokens - 1
        while left > 0:
            self.passes += 1
            chance = (self.passes * GOLDEN) % 1
            kept = sum(chance < keep**position for position in range(1, draft_tokens + 1))
            for position in range(kept):
                self.per_position[position] += 1
            histogram[kept] += 1
            self.drafted += draft_tokens
            self.accepted += kept
            left -= 1 + kept
        return Verified(sum(histogram), histogram)
