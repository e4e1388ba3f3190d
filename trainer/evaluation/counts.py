"""What is made of the drafts of an evaluation: acceptance over all of them and over parts of them.

A draft belongs to the part in which it begins: the position and the phase of the last token that was known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from draftfleet.thoughts import CLOSE, OPEN
from draftfleet.tokens import TargetTokenizer
from trainer.evaluation.asking import Asked
from trainer.evaluation.intervals import Interval, of_ratio
from trainer.speculate import Answer

FIRST_BUCKET_TOKENS = 512


@dataclass(frozen=True, slots=True)
class DraftCount:
    """A draft that the target verified."""

    conversation: str
    source: str
    turn: int
    start: int  # tokens of the answer that were known
    position: int  # tokens that were known, the prompt's included
    phase: str  # thinking or answer
    accepted: int
    chances: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Of some drafts. `interval` is of the length, at 95 %; None where they are all of one conversation."""

    conversations: int
    drafts: int
    accepted: int
    acceptance_length: float
    interval: Interval | None
    acceptance_per_position: list[float]


def drafts_of(asked: Asked, answer: Answer, num_thinking: int) -> list[DraftCount]:
    """`num_thinking` tokens of the answer are its thought, the closing mark included."""
    return [
        DraftCount(
            conversation=asked.conversation,
            source=asked.source,
            turn=asked.turn,
            start=start,
            position=len(asked.ids) + start,
            phase="thinking" if start < num_thinking else "answer",
            accepted=accepted,
            chances=chances,
        )
        for start, accepted, chances in zip(answer.starts, answer.accepted, answer.chances, strict=True)
    ]


def acceptance(drafts: Sequence[DraftCount], k: int) -> Acceptance:
    accepted, number = sum(draft.accepted for draft in drafts), len(drafts)
    by_conversation = totals(drafts, lambda draft: draft.accepted)
    interval = of_ratio(by_conversation, most=k)
    return Acceptance(
        conversations=len(by_conversation),
        drafts=number,
        accepted=accepted,
        acceptance_length=1 + accepted / max(number, 1),
        interval=None if interval is None else (1 + interval[0], 1 + interval[1]),
        acceptance_per_position=[
            sum(draft.accepted > position for draft in drafts) / max(number, 1) for position in range(k)
        ],
    )


def totals(drafts: Iterable[DraftCount], value: Callable[[DraftCount], float]) -> list[tuple[float, float]]:
    """For each conversation the sum of a value over its drafts, and their number."""
    found: dict[str, tuple[float, float]] = {}
    for draft in drafts:
        held, number = found.get(draft.conversation, (0.0, 0.0))
        found[draft.conversation] = held + value(draft), number + 1
    return list(found.values())


def parts(drafts: Iterable[DraftCount], name: Callable[[DraftCount], str], k: int) -> dict[str, Acceptance]:
    """By name, the largest first. Empty where all would be in one part without a name."""
    found: dict[str, list[DraftCount]] = defaultdict(list)
    for draft in drafts:
        found[name(draft)].append(draft)
    if not any(found):
        return {}
    ordered = sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))
    return {name or "no source": acceptance(some, k) for name, some in ordered}


def bucket(position: int) -> str:
    """<512, 512-1k, 1k-2k, 2k-4k, .."""
    if position < FIRST_BUCKET_TOKENS:
        return f"<{FIRST_BUCKET_TOKENS}"
    low = 1 << (position.bit_length() - 1)
    return f"{_short(low)}-{_short(2 * low)}"


def bucket_order(name: str) -> int:
    low = name.partition("-")[0]
    return 0 if low.startswith("<") else int(low.removesuffix("k")) * (1024 if low.endswith("k") else 1)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def num_thinking(tokenizer: TargetTokenizer, prompt: list[int], answer: list[int]) -> int:
    """Tokens of an answer up to the end of its thought, the closing mark included; all, if the thought never ends."""
    text = tokenizer.decode(answer)
    if CLOSE not in text:
        return len(answer) if tokenizer.opens_thought(prompt) or text.lstrip().startswith(OPEN) else 0
    low, high = 0, len(answer)  # the mark is in the first `high` tokens and not in the first `low`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if CLOSE in tokenizer.decode(answer[:middle]) else (middle, high)
    return high
