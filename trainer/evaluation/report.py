"""What an evaluation says, as it stands in evaluation.json. docs/evaluation.md explains each number."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from trainer.evaluation.counts import Acceptance
from trainer.evaluation.forced import TeacherForced
from trainer.evaluation.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One k of a sweep. Speeds are of one request at a time."""

    k: int
    drafts: int
    accepted: int
    acceptance_length: float
    interval: Interval | None
    acceptance_per_position: list[float]
    lossless_prompts: int | None
    tokens_per_s: float
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`drafts` are passes of the target that verified a draft. Each turn of a conversation is a prompt;
    `prompts_too_long` leave no room for an answer.

    `rechecked` prompts came out differently when they were decoded plainly in a batch, whose sums run in another order,
    and were compared again with plain decoding alone. Speeds are of one request at a time, over `timed_prompts`.
    What is None is not to be had: `lossless` and `teacher_forced` of sampled answers, `expected_...` of greedy ones.
    """

    run: str
    drafter: str
    checkpoint: str
    k: int
    temperature: float
    drafts_are: str
    seed: int
    prompts: int
    conversations: int
    prompts_too_long: int
    tokens: int
    drafts: int
    drafted: int
    accepted: int
    acceptance_length: float
    interval: Interval | None
    acceptance_per_position: list[float]
    expected_acceptance_length: float | None
    expected_acceptance_per_position: list[float] | None
    lossless: bool | None
    lossless_prompts: int | None
    rechecked: int
    timed_prompts: int
    tokens_per_s: float
    plain_tokens_per_s: float
    speedup: float
    seconds: float
    dtype: str
    sweep: list[SweepRow]
    domains: dict[str, Acceptance]
    phases: dict[str, Acceptance]
    context: dict[str, Acceptance]
    turns: dict[str, Acceptance]
    teacher_forced: TeacherForced | None
    warnings: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"
