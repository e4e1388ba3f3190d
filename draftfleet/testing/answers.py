"""What the fake model says: a thought and an answer that depend on the prompt alone, as ids and as text."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from draftfleet.records import Conversation
from draftfleet.tokens import TargetTokenizer

OPEN, CLOSE = "<think>", "</think>"
_TEXT = (
    "river stone cloud paper lemon tiger violin window garden rocket silver candle bridge forest island pepper "
    "button camera desert engine feather guitar hammer insect jacket kettle ladder mirror needle orange pencil rabbit"
)
_WORDS = _TEXT.split()
_FIRST_WORD = 16
"""Ids of the words begin here; below it are the marks: 1 opens the thought, 2 closes it, 3 ends the turn."""
_MARKS = {1: OPEN, 2: CLOSE, 3: ""}
_LONG = 32_768
_RIVER = [(i * 7919 + i // 31) % len(_WORDS) for i in range(_LONG)]
_RIVER_IDS = [_FIRST_WORD + i for i in _RIVER]


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_ids: list[int]
    token_ids: list[int]
    reasoning: str | None
    content: str | None
    finish_reason: str


class Speaker:
    """With a tokenizer, ids and text are those of a real model's. Without, every word is one id."""

    def __init__(self, tokenizer: TargetTokenizer | None, tokens: int, spread: float) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._spread = spread

    def answer(self, body: dict[str, Any], prompt: str) -> Answer:
        """`prompt` is the JSON text of the messages; the rest of the request is in `body`."""
        digest = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest())
        switches: dict[str, Any] = body.get("chat_template_kwargs") or {}
        is_thinking = switches.get("enable_thinking") is not False
        length = self._length(digest)
        ids = self._ids(digest, length, is_thinking)
        limit = body.get("max_tokens") or _LONG
        kept = ids[:limit]
        reasoning, content = self._text(kept)
        return Answer(
            self._prompt_ids(body["messages"], prompt, switches),
            kept,
            reasoning,
            content,
            "stop" if len(ids) <= limit else "length",
        )

    def ended_in_thought(self, answer: Answer, *, cut: bool) -> Answer:
        """The same answer, had it ended before its thought was closed."""
        marks = {2} if self._tokenizer is None else set(self._encode(CLOSE))
        end = next((i for i, token in enumerate(answer.token_ids) if token in marks), len(answer.token_ids))
        ids = answer.token_ids[: max(end, 1)]
        reasoning, _ = self._text(ids)
        last = [] if cut else self._stop()
        return Answer(answer.prompt_ids, [*ids, *last], reasoning, None, "length" if cut else "stop")

    def _length(self, digest: int) -> int:
        if not self._spread:
            return self._tokens
        normal = NormalDist().inv_cdf(((digest & 0xFFFF) + 0.5) / 0x10000)
        length = self._tokens * math.exp(self._spread * normal - self._spread**2 / 2)
        return min(max(round(length), 5), _LONG // 2)

    def _ids(self, digest: int, length: int, is_thinking: bool) -> list[int]:
        start = (digest >> 16) % (_LONG // 2)
        thought = (length - 3) // 2 if is_thinking else 0
        middle, end = start + thought, start + max(length - (3 if is_thinking else 1), 1)
        if self._tokenizer is None:
            opened = [1, *_RIVER_IDS[start:middle], 2] if is_thinking else []
            return [*opened, *_RIVER_IDS[middle:end], 3]
        text = " ".join(_WORDS[i] for i in _RIVER[middle:end])
        if is_thinking:
            text = f"{OPEN}\n{' '.join(_WORDS[i] for i in _RIVER[start:middle])}\n{CLOSE}\n\n{text}"
        return [*self._encode(text), *self._stop()]

    def _text(self, ids: list[int]) -> tuple[str | None, str | None]:
        if self._tokenizer is None:
            text = " ".join(_MARKS[i] if i < _FIRST_WORD else _WORDS[i - _FIRST_WORD] for i in ids)
        else:
            text = self._tokenizer.decode(ids).removesuffix(self._tokenizer.end_of_turn)
        if not text.startswith(OPEN):
            return None, text.strip() or None
        thought, _, content = text.removeprefix(OPEN).partition(CLOSE)
        return thought.strip() or None, content.strip() or None

    def _prompt_ids(self, messages: Conversation, prompt: str, switches: dict[str, Any]) -> list[int]:
        if self._tokenizer is not None:
            return self._tokenizer.prompt_ids(messages, template_kwargs=switches)
        return [_FIRST_WORD + i % len(_WORDS) for i in range(prompt.count(" ") + 4)]

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text)

    def _stop(self) -> list[int]:
        return [3] if self._tokenizer is None else self._encode(self._tokenizer.end_of_turn)
