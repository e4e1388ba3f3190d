"""What a server counts of its drafts and requests: vLLM on its /metrics page, SGLang in each answer and as a gauge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from workers import gauges

REQUESTS = ("vllm:request_success_total", "sglang:num_requests_total")
DRAFTS = ("vllm:spec_decode_num_drafts_total",)
DRAFTED = ("vllm:spec_decode_num_draft_tokens_total",)
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)
PER_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos_total",)
LENGTH = ("sglang:spec_accept_length",)
"""SGLang's gauge: the mean of the last steps that it logged; 0 where it does not draft."""
NAMES = (*REQUESTS, *DRAFTS, *DRAFTED, *ACCEPTED, *PER_POSITION, *LENGTH)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of drafts. `per_position` counts the drafts that were kept at least up to each position.

    `source`: `counters` of the server, its `answers`, one by one, or its `gauge`, which tells a mean and no counts.
    """

    source: Literal["counters", "answers", "gauge"]
    drafts: int = 0
    drafted: int | None = None
    accepted: int = 0
    per_position: tuple[int, ...] = ()
    gauge: float = 0.0

    @property
    def length(self) -> float:
        """Tokens that a verifying pass yields, the target's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else self.gauge

    @property
    def shares(self) -> list[float]:
        """By position, of all drafts."""
        return [count / self.drafts for count in self.per_position] if self.drafts else []


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the server started; None where it does not tell. vLLM counts drafts only where it was told to draft."""

    requests: float | None = None
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    per_position: tuple[float, ...] = ()
    length: float | None = None

    @property
    def is_drafting(self) -> bool:
        """Whether the page says that the server has a drafter."""
        return self.drafts is not None or bool(self.length)

    def since(self, before: Counters) -> Acceptance | None:
        """What was drafted since an earlier look; None where the page does not count that."""
        if self.drafts is None:
            return None if not self.length else Acceptance("gauge", gauge=self.length)
        positions = zip_longest(self.per_position, before.per_position, fillvalue=0.0)
        return Acceptance(
            "counters",
            drafts=int(self.drafts - (before.drafts or 0)),
            drafted=int((self.drafted or 0) - (before.drafted or 0)),
            accepted=int((self.accepted or 0) - (before.accepted or 0)),
            per_position=tuple(int(now - then) for now, then in positions),
        )


def read(metrics: str) -> Counters:
    """Added up over the engines behind the address."""
    samples = gauges.samples_of(metrics, NAMES)
    by_position: dict[int, float] = {}
    for sample in samples:
        if sample.name in PER_POSITION:
            position = int(sample.labels["position"])
            by_position[position] = by_position.get(position, 0.0) + sample.value
    lengths = [sample.value for sample in samples if sample.name in LENGTH and sample.value]
    return Counters(
        requests=gauges.total(samples, REQUESTS),
        drafts=gauges.total(samples, DRAFTS),
        drafted=gauges.total(samples, DRAFTED),
        accepted=gauges.total(samples, ACCEPTED),
        per_position=tuple(by_position[position] for position in sorted(by_position)),
        length=sum(lengths) / len(lengths) if lengths else None,
    )


def pooled(parts: Sequence[Acceptance]) -> Acceptance | None:
    """All drafts together, so that a long answer weighs more than a short one; of gauges, their mean."""
    if not parts:
        return None
    counted = [part for part in parts if part.drafts]
    if not counted:
        return Acceptance(parts[0].source, gauge=sum(part.gauge for part in parts) / len(parts))
    drafted = [part.drafted for part in counted if part.drafted is not None]
    return Acceptance(
        counted[0].source,
        drafts=sum(part.drafts for part in counted),
        drafted=sum(drafted) if drafted else None,
        accepted=sum(part.accepted for part in counted),
        per_position=tuple(map(sum, zip_longest(*(part.per_position for part in counted), fillvalue=0))),
    )
