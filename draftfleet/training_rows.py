"""From a sample to the rows that a drafter is trained on: one per assistant turn that the target finished.

A chat template drops earlier thinking, so what the model saw before its third answer is not what it wrote as its first
two: each turn has prompt ids of its own, and no row holds two turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftfleet.records import Conversation, IdsSource, Outcome, Sample, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """An assistant turn and what came before it. `turn` counts from 0 among those that were asked.

    `messages` are the prefix that the target was asked on. `ids_match_usage` is of this turn alone.
    """

    key: str
    turn: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    ids_match_usage: bool
    ids_source: IdsSource
    outcome: Outcome
    finish_reason: str | None
    messages: Conversation
    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]] | None


def turn_key(row_key: str, turn: int) -> str:
    """The first turn has the key of its sample, whether others follow or not: as the sample grows, keys stay."""
    return f"{row_key}.{turn}" if turn else row_key


def rows_of(sample: Sample) -> list[TurnRow]:
    """In the order of the conversation. A failed sample gives the turns that were finished before."""
    rows = [_earlier(sample, number, turn) for number, turn in enumerate(sample.turns)]
    return rows if sample.outcome == "failed" else [*rows, _last(sample)]


def _earlier(sample: Sample, number: int, turn: Turn) -> TurnRow:
    answer = sample.messages[turn.message]
    return TurnRow(
        key=turn_key(sample.row_key, number),
        turn=number,
        prompt_token_ids=turn.prompt_token_ids,
        token_ids=turn.token_ids,
        ids_match_usage=turn.ids_match_usage,
        ids_source=turn.ids_source,
        outcome="ok",  # after any other the conversation would have ended
        finish_reason=turn.finish_reason,
        messages=sample.messages[: turn.message],
        reasoning=answer.get("reasoning_content"),
        content=answer.get("content") or None,
        tool_calls=answer.get("tool_calls"),
    )


def _last(sample: Sample) -> TurnRow:
    return TurnRow(
        key=turn_key(sample.row_key, len(sample.turns)),
        turn=len(sample.turns),
        prompt_token_ids=sample.prompt_token_ids,
        token_ids=sample.token_ids,
        ids_match_usage=sample.ids_match_usage,
        ids_source=sample.ids_source,
        outcome=sample.outcome,
        finish_reason=sample.finish_reason,
        messages=sample.messages,
        reasoning=sample.reasoning,
        content=sample.content,
        tool_calls=sample.tool_calls,
    )
