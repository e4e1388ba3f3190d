"""An answer as it comes in: its ids and text, and the moments of its first and its last token."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from draftfleet.errors import Transient
from workers.bench.counters import Acceptance
from workers.dialects import start_of

END = "[DONE]"


@dataclass(slots=True)
class Answer:
    """Moments are of `time.perf_counter`. `ids` are empty where the server does not tell them.

    Of `verified`, `correct` and `histogram` SGLang tells: passes that verified a draft, tokens that were kept, and how
    many passes kept 0, 1, 2, ... tokens.
    """

    asked_at: float
    first_at: float | None = None
    last_at: float | None = None
    prompt_ids: list[int] = field(default_factory=list[int])
    ids: list[int] = field(default_factory=list[int])
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    verified: int | None = None
    correct: int | None = None
    drafted: int | None = None
    histogram: list[int] = field(default_factory=list[int])
    is_over: bool = False

    @property
    def first_token_s(self) -> float:
        return (self.first_at or self.asked_at) - self.asked_at

    @property
    def inter_token_s(self) -> tuple[float, int]:
        """Seconds from its first to its last token, and the tokens that came in them."""
        if self.first_at is None or self.last_at is None:
            return 0.0, 0
        return self.last_at - self.first_at, max(self.tokens - 1, 0)

    @property
    def acceptance(self) -> Acceptance | None:
        if not self.verified:
            return None
        # The first token comes of the prompt's own pass.
        correct = max(self.tokens - 1 - self.verified, 0) if self.correct is None else self.correct
        kept = self.histogram
        per_position = tuple(sum(kept[position:]) for position in range(1, len(kept)))
        return Acceptance("answers", self.verified, self.drafted, correct, per_position)

    def take(self, line: str) -> None:
        """One line of the stream. Raises Transient on an error that it brings, or on what is no event."""
        if not line.startswith("data:"):
            return
        said = line.removeprefix("data:").strip()
        if said == END:
            self.is_over = True
            return
        try:
            event: dict[str, Any] = json.loads(said)
            if "error" in event:
                raise Transient("the server broke off its answer", body=start_of(said))
            took = self._native(event) if "meta_info" in event else self._chat(event)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise Transient(
                f"the server streamed what is no part of an answer ({error!r})", body=start_of(said), kind="unusable"
            ) from None
        if took:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at

    def _chat(self, event: dict[str, Any]) -> bool:
        """Whether it brought a token. The count stands in the last event, which has no choice."""
        self.prompt_ids = event.get("prompt_token_ids") or self.prompt_ids
        if usage := event.get("usage"):
            self.tokens = int(usage["completion_tokens"])
        if not event.get("choices"):
            return False
        choice = event["choices"][0]
        delta: dict[str, Any] = choice.get("delta") or {}
        ids: list[int] = choice.get("token_ids") or []
        text = "".join(delta.get(name) or "" for name in ("reasoning", "reasoning_content", "content"))
        self.ids += ids
        self.text += text
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return bool(ids or text or delta.get("tool_calls"))

    def _native(self, event: dict[str, Any]) -> bool:
        """SGLang's own: each event has the ids so far, or, where it was started so, the new ones alone."""
        meta = event["meta_info"]
        ids: list[int] = event.get("output_ids") or []
        before, self.tokens = self.tokens, int(meta["completion_tokens"])
        self.ids = ids if len(ids) >= self.tokens else self.ids + ids
        if reason := meta.get("finish_reason"):
            self.finish_reason = str(reason["type"] if isinstance(reason, dict) else reason)
        self.verified = meta.get("spec_verify_ct", self.verified)
        correct = [meta[name] for name in ("spec_num_correct_drafts", "spec_accept_token_num") if name in meta]
        drafted = [meta[name] for name in ("spec_num_proposed_drafts", "spec_draft_token_num") if name in meta]
        self.correct, self.drafted = next(iter(correct), self.correct), next(iter(drafted), self.drafted)
        histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram")
        self.histogram = histogram or self.histogram
        return self.tokens > before
