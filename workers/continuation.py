"""An answer that was cut goes on: what is asked, and how what comes is put behind what is there."""

from __future__ import annotations

from dataclasses import replace

from draftfleet.errors import BadRequest
from draftfleet.records import Unfinished
from draftfleet.thoughts import CLOSE, OPEN
from draftfleet.tokens import TargetTokenizer
from workers.dialects import Ask, Completion, Dialect, Request
from workers.dialects.openai import split_reasoning

STANDS = "The cut answer stands, and `draftfleet continue` can ask for it again."


def request(dialect: Dialect, ask: Ask, unfinished: Unfinished, server: str) -> Request:
    """Raises BadRequest where the server takes no ids."""
    given = [*unfinished.prompt_token_ids, *unfinished.token_ids]
    asked = dialect.continuation(replace(ask, prompt_token_ids=given))
    if asked is None:
        raise BadRequest(
            f"server {server} ({dialect.NAME}) takes no token ids, so no answer can go on there: serve the target with "
            f"vLLM or SGLang. {STANDS}"
        )
    return asked


def joined(unfinished: Unfinished, following: Completion, tokenizer: TargetTokenizer | None, server: str) -> Completion:
    """One answer of the ids that were there and those that followed. Raises BadRequest where they do not fit."""
    given = [*unfinished.prompt_token_ids, *unfinished.token_ids]
    if following.token_ids is None:
        raise BadRequest(f"server {server} went on with an answer and gave no token ids. {STANDS}")
    if following.prompt_token_ids is not None and following.prompt_token_ids != given:
        raise BadRequest(
            f"server {server} was given {len(given)} token ids to go on from and went on from "
            f"{len(following.prompt_token_ids)} others. {STANDS}"
        )
    ids = [*unfinished.token_ids, *following.token_ids]
    reasoning, source, content = _texts(unfinished, following, ids, tokenizer)
    counted = following.completion_tokens
    return replace(
        following,
        reasoning=reasoning,
        reasoning_source=source,
        content=content,
        tool_calls=None,
        prompt_token_ids=unfinished.prompt_token_ids,
        token_ids=ids,
        prompt_tokens=len(unfinished.prompt_token_ids),
        completion_tokens=-1 if counted < 0 else len(unfinished.token_ids) + counted,
    )


def _texts(
    unfinished: Unfinished, following: Completion, ids: list[int], tokenizer: TargetTokenizer | None
) -> tuple[str | None, str | None, str | None]:
    """Reasoning, where it stood, and content: from the text of all ids, where it says where the thought ends."""
    if tokenizer is not None:
        text = tokenizer.decode(ids).removesuffix(tokenizer.end_of_turn)
        was_open = tokenizer.opens_thought(unfinished.prompt_token_ids)
        if was_open or OPEN in text or CLOSE in text or not unfinished.reasoning:
            text = text if not was_open or text.lstrip().startswith(OPEN) else OPEN + text
            reasoning, source, content = split_reasoning({}, text)
            return reasoning, (unfinished.reasoning_source or source) if reasoning else None, content or None
    return _appended(unfinished, following)


def _appended(unfinished: Unfinished, following: Completion) -> tuple[str | None, str | None, str | None]:
    """The earlier text and the new one. A thought that was cut goes on until the new text closes it: an answer that was
    cut right behind the closing mark looks the same, and then all stands in the thought."""
    new = following.content or ""
    if following.reasoning is not None:
        reasoning = (unfinished.reasoning or "") + following.reasoning
        return reasoning, unfinished.reasoning_source or following.reasoning_source, following.content
    if unfinished.reasoning and not unfinished.content:
        return unfinished.reasoning + new, unfinished.reasoning_source, None
    return unfinished.reasoning, unfinished.reasoning_source, (unfinished.content or "") + new or None
