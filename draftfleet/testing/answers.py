"""What the fake model says: a thought and an answer that depend on the prompt alone, as ids and as text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Any

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
_SHORTEST, _LONGEST = 5, 16_384
_RIVER = [(i * 7919 + i // 31) % len(_WORDS) for i in range(2 * _LONGEST)]
"""All that is ever said: an answer is a piece of it."""
_NORMAL = NormalDist()
_MOST_CUT = 10_000
_cut: dict[bytes, str] = {}
"""By all that a model was given and had said when it was cut, the ids that would have followed. Of all servers of this
process: another may be asked to go on."""


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids as they stand in JSON, without the brackets: writing them out one by one would cost the most."""

    text: str
    count: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Ids:
        return cls(", ".join(map(str, numbers)), len(numbers))

    def numbers(self) -> list[int]:
        return json.loads(f"[{self.text}]")

    def without_last(self) -> Ids:
        return Ids(self.text.rpartition(",")[0], self.count - 1)


_RIVER_IDS = Ids.of([_FIRST_WORD + i for i in _RIVER]).text + ", "
_ALL_IDS = Ids.of(range(_FIRST_WORD, _FIRST_WORD + len(_WORDS))).text + ", "
_WIDTH = len("16, ")
"""Of every word's id, so that a piece is found without counting."""
_RIVER_TEXT = " ".join(_WORDS[i] for i in _RIVER) + " "
_RIVER_AT = [0, *accumulate(len(_WORDS[i]) + 1 for i in _RIVER)]
"""Where each word begins in the text."""


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_ids: Ids
    token_ids: Ids
    reasoning: str | None
    content: str | None
    finish_reason: str


class Speaker:
    """With a tokenizer, ids and text are those of a real model's. Without, every word is one id."""

    def __init__(self, tokenizer: TargetTokenizer | None, *, tokens: int, spread: float, most_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._spread = spread
        self._most = most_tokens

    def answer(self, body: dict[str, Any], prompt: str) -> Answer:
        """`prompt` is the text of the prompt; the rest of the request is in `body`, with `ids` where it is made of
        them. Ids that end with an answer that was cut are gone on with."""
        answer, rest = self._continued(body) or self._answer(body, prompt)
        if rest:
            _remember(f"{answer.prompt_ids.text}, {answer.token_ids.text}", rest)
        return answer

    def spelled(self, answer: Answer) -> str:
        """Its text as it was made, marks included."""
        return self._spelled(answer.token_ids.numbers())

    def read(self, ids: list[int]) -> str:
        """A prompt of ids as text. Without a tokenizer ids of a prompt mean nothing."""
        return self._tokenizer.decode(ids) if self._tokenizer else json.dumps(ids)

    def _continued(self, body: dict[str, Any]) -> tuple[Answer, str] | None:
        asked = Ids.of(body.get("ids", []))
        following = _cut.get(_key(asked.text))
        if following is None:
            return None
        ids = Ids(following, following.count(",") + 1).numbers()
        limit: int = body.get("max_tokens") or len(ids)
        reasoning, content = self._text(ids[:limit])
        ended = "stop" if len(ids) <= limit else "length"
        return Answer(asked, Ids.of(ids[:limit]), reasoning, content, ended), Ids.of(ids[limit:]).text

    def _answer(self, body: dict[str, Any], prompt: str) -> tuple[Answer, str]:
        """The answer, and the ids that would have followed where it is cut."""
        digest = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest())
        switches: dict[str, Any] = body.get("chat_template_kwargs") or {}
        is_off = switches.get("enable_thinking") is False or body.get("reasoning_effort") == "none"
        is_thinking = not is_off and not prompt.rstrip().endswith(CLOSE)
        length = self._length(digest)
        start = (digest >> 16) % _LONGEST
        thought = max(length - 3, 0) // 2 if is_thinking else 0
        rest = max(length - (3 if is_thinking else 1) - thought, 1)
        limit: int = body.get("max_tokens") or 2 * _LONGEST
        if self._tokenizer is None:
            asked = Ids.of(body["ids"]) if "ids" in body else _asked(prompt)
            lengths = thought if is_thinking else None, rest
            answer = _in_words(asked, start, lengths, limit)
            if answer.finish_reason == "stop":
                return answer, ""
            return answer, _in_words(asked, start, lengths, 3 * _LONGEST).token_ids.text[
                len(answer.token_ids.text) + 2 :
            ]
        ids = self._ids(start, start + thought, start + thought + rest, is_thinking)
        kept = ids[:limit]
        reasoning, content = self._text(kept)
        given = body.get("ids") or self._tokenizer.prompt_ids(body["messages"], template_kwargs=switches)
        ended = "stop" if len(ids) <= limit else "length"
        return Answer(Ids.of(given), Ids.of(kept), reasoning, content, ended), Ids.of(ids[limit:]).text

    def ended_in_thought(self, answer: Answer, *, cut: bool) -> Answer:
        """The same answer, had it ended before its thought was closed."""
        marks = {2} if self._tokenizer is None else set(self._tokenizer.encode(CLOSE))
        ids = answer.token_ids.numbers()
        end = next((i for i, token in enumerate(ids) if token in marks), len(ids))
        following = Ids.of(ids[max(end, 1) :]).text
        ids = ids[: max(end, 1)]
        reasoning, _ = self._text(ids)
        if cut and following:
            _remember(f"{answer.prompt_ids.text}, {Ids.of(ids).text}", following)
        last = [] if cut else self._stop()
        return Answer(answer.prompt_ids, Ids.of([*ids, *last]), reasoning, None, "length" if cut else "stop")

    def _length(self, digest: int) -> int:
        if not self._spread:
            return min(self._tokens, self._most)
        normal = _NORMAL.inv_cdf(((digest & 0xFFFF) + 0.5) / 0x10000)
        length = self._tokens * math.exp(self._spread * normal - self._spread**2 / 2)
        return min(max(round(length), _SHORTEST), self._most)

    def _ids(self, start: int, middle: int, end: int, is_thinking: bool) -> list[int]:
        assert self._tokenizer is not None
        text = " ".join(_WORDS[i] for i in _RIVER[middle:end])
        if is_thinking:
            text = f"{OPEN}\n{' '.join(_WORDS[i] for i in _RIVER[start:middle])}\n{CLOSE}\n\n{text}"
        return [*self._tokenizer.encode(text), *self._stop()]

    def _spelled(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(_MARKS[i] if i < _FIRST_WORD else _WORDS[i - _FIRST_WORD] for i in ids)
        return self._tokenizer.decode(ids).removesuffix(self._tokenizer.end_of_turn)

    def _text(self, ids: list[int]) -> tuple[str | None, str | None]:
        text = self._spelled(ids)
        if not text.startswith(OPEN):
            return None, text.strip() or None
        thought, _, content = text.removeprefix(OPEN).partition(CLOSE)
        return thought.strip() or None, content.strip() or None

    def _stop(self) -> list[int]:
        return [3] if self._tokenizer is None else self._tokenizer.encode(self._tokenizer.end_of_turn)


def _key(ids: str) -> bytes:
    return hashlib.blake2b(ids.encode(), digest_size=16).digest()


def _remember(said: str, following: str) -> None:
    _cut[_key(said)] = following
    while len(_cut) > _MOST_CUT:
        del _cut[next(iter(_cut))]


def _asked(prompt: str) -> Ids:
    """As many ids as the prompt has words."""
    count = prompt.count(" ") + 4
    return Ids((_ALL_IDS * (count // len(_WORDS) + 1))[: _WIDTH * count - 2], count)


def _in_words(asked: Ids, start: int, lengths: tuple[int | None, int], limit: int) -> Answer:
    """Cut out of what was prepared; `lengths` of the thought, if any, and of the rest are in words, `limit` in ids."""
    thought, rest = lengths[0] or 0, lengths[1]
    marks = 0 if lengths[0] is None else 2
    total = marks + thought + rest + 1
    thought_kept = min(thought, max(limit - 1, 0))
    rest_kept = min(rest, max(limit - marks - thought, 0))
    middle = start + thought
    ids = [_RIVER_IDS[_WIDTH * middle : _WIDTH * (middle + rest_kept)], "3, " if limit >= total else ""]
    if marks:
        closed = "2, " if limit >= thought + 2 else ""
        ids = ["1, ", _RIVER_IDS[_WIDTH * start : _WIDTH * (start + thought_kept)], closed, *ids]
    return Answer(
        asked,
        Ids("".join(ids)[:-2], min(limit, total)),
        _words(start, start + thought_kept),
        _words(middle, middle + rest_kept),
        "stop" if limit >= total else "length",
    )


def _words(start: int, end: int) -> str | None:
    return _RIVER_TEXT[_RIVER_AT[start] : _RIVER_AT[end] - 1] if end > start else None
