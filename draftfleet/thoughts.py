"""Thoughts in a text, between the marks that most templates use: told apart from the answer in one way by everybody."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def opens(prompt: str) -> bool:
    """Whether a prompt ends with the mark that opens a thought: the answer then begins inside it."""
    return prompt.rstrip().endswith(OPEN)


def apart(text: str | None) -> tuple[str | None, str | None]:
    """The thought and the answer; None where there is none of it.

    A closing mark without its opening counts too: some templates write the opening into the prompt.
    """
    if not text or (CLOSE not in text and not text.lstrip().startswith(OPEN)):
        return None, text
    thought, closed, rest = text.partition(CLOSE)
    return thought.lstrip().removeprefix(OPEN).strip("\n") or None, rest.lstrip("\n") if closed else None
