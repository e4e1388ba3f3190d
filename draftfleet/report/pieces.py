"""The text of each token by itself: what a tokenizer only tells of whole texts."""

from __future__ import annotations

from collections.abc import Sequence

from draftfleet.tokens import TargetTokenizer

BROKEN = "\ufffd"
LONGEST_CHARACTER = 8
"""Tokens that a character may be spread over, more or less."""


class Pieces:
    """Remembers tokens: the rows of a report share most of theirs."""

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text per id. Of a character that several tokens make, the last has it and the others are empty."""
        pieces = [self._one(token) for token in ids]
        at = 0
        while at < len(pieces):
            if BROKEN in pieces[at]:
                at = self._joined(ids, pieces, at)
            else:
                at += 1
        return pieces

    def _joined(self, ids: Sequence[int], pieces: list[str], first: int) -> int:
        """Put together what stands for a character only as a group. Returns the place after it."""
        for last in range(first + 2, min(first + LONGEST_CHARACTER, len(ids)) + 1):
            text = self._tokenizer.decode(list(ids[first:last]))
            if BROKEN not in text:
                pieces[first:last] = [*[""] * (last - first - 1), text]
                return last
        return first + 1

    def _one(self, token: int) -> str:
        if token not in self._known:
            try:
                self._known[token] = self._tokenizer.decode([token])
            except (OverflowError, ValueError, IndexError):  # an id that is none of this tokenizer's
                self._known[token] = f"[{token}]"
        return self._known[token]
