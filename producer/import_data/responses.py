"""One response as a file tells it: what was asked, as far as it says so, and what was answered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from draftfleet.records import Conversation, Prompt
from producer.shapes import Malformed, kind

Fields = Mapping[str, Any]

REASONING = ("reasoning", "reasoning_content", "thinking")
TOKEN_IDS = ("token_ids", "completion_token_ids", "response_token_ids", "output_token_ids", "output_ids")
PROMPT_TOKEN_IDS = ("prompt_token_ids", "prompt_ids")
NAMES = ("row_key", "prompt_id", "id", "custom_id")
"""Where a name of ours may stand."""

COMPLETE = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("tool_calls", "tool_use", "function_call"), "tool_calls"),
}
CUT = ("length", "max_tokens", "max_new_tokens", "model_length")


class Refused(Exception):
    """A response that was understood and is no sample of this run. `reason` is what it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """`names` may be ours, or the data set's own. `asked` is read as the producer reads a row; its id is of all of it.

    `verbatim` is the text as the model wrote it, where the thought stood between tags in the content. `finish_reason`
    is `stop`, `tool_calls`, `length`, or None where nobody says; `completion_tokens` is -1 there.
    """

    names: tuple[str, ...] = ()
    asked: Prompt | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_source: str | None = None
    verbatim: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    completion_tokens: int = -1
    model: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def response(
    message: Fields, around: Sequence[Fields], *, names: tuple[str, ...], asked: Prompt | None, model: bool = True
) -> Response:
    """From the assistant's message and what stands around it, the nearest first. Raises Malformed or Refused."""
    places = (message, *around)
    content = _content(first((message,), ("content", "value", "text")))
    verbatim = content
    reasoning, source, content = split_thought(places, content)
    usage = next((one for one in map(_usage, places) if one is not None), {})
    made = Response(
        names=names,
        asked=asked,
        content=content or None,
        reasoning=reasoning,
        reasoning_source=source,
        verbatim=None if verbatim == content else verbatim,
        tool_calls=_calls(first(places, ("tool_calls",))),
        finish_reason=_finish_reason(places),
        prompt_token_ids=_ids(places, PROMPT_TOKEN_IDS),
        token_ids=_ids(places, TOKEN_IDS),
        completion_tokens=_count(first((usage, *places), ("completion_tokens", "output_tokens"))),
        model=_text(first(around, ("model",))) if model else None,
    )
    if not made.has_text and not made.token_ids:
        raise Refused("no answer", _text(first(places, ("error",))) or "neither text nor token ids")
    return made


def first(places: Iterable[Fields], names: Iterable[str]) -> Any:
    """The first value that is there and not null."""
    return next((place[name] for place in places for name in names if place.get(name) is not None), None)


def names_in(row: Fields) -> tuple[str, ...]:
    found = (row.get(name) for name in NAMES)
    return tuple(dict.fromkeys(str(one) for one in found if isinstance(one, str | int) and one != ""))


def an_object(value: object) -> dict[str, Any] | None:
    """An object, or the same as JSON text; None if it is neither."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def parsed_list(value: object, what: str) -> list[Any]:
    """A list, or the same as JSON text. Raises Malformed."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"{what} is a text that is not JSON: {error}") from None
    if not isinstance(value, list):
        raise Malformed(f"{what} is {kind(value)}, not a list")
    return cast(list[Any], value)


def earlier_answer(message: Fields, asked: Prompt, finish_reason: str | None) -> Response:
    """An assistant turn in the middle of a conversation, normalised already. Of it only the text is known."""
    content, reasoning = _content(message.get("content")), _text(message.get("reasoning_content"))
    return Response(
        asked=asked,
        content=content,
        reasoning=reasoning,
        reasoning_source="reasoning_content" if reasoning else None,
        tool_calls=message.get("tool_calls"),
        finish_reason=finish_reason,
    )


def is_assistant(message: object) -> bool:
    fields = an_object(message) or {}
    role = first((fields,), ("role", "from"))
    return isinstance(role, str) and role.strip().casefold() in ("assistant", "gpt", "chatgpt", "model", "bot")


def without_answers(messages: Conversation) -> Conversation:
    """What the world said: of a conversation that is answered turn by turn, all that does not depend on the target."""
    return [message for message in messages if message["role"] != "assistant"]


def split_thought(places: Sequence[Fields], content: str | None) -> tuple[str | None, str | None, str | None]:
    """Reasoning, where it stood, and the content without it, as the worker tells them apart.

    A `</think>` without its opening counts too: some templates write the opening into the prompt.
    """
    for name in REASONING:
        if text := _text(first(places, (name,))):
            return text, name, content
    if not content or ("</think>" not in content and not content.lstrip().startswith("<think>")):
        return None, None, content
    thought, closed, rest = content.partition("</think>")
    thought = thought.lstrip().removeprefix("<think>").strip("\n")
    answer = rest.lstrip("\n") if closed else None
    return (thought, "think_tags", answer) if thought else (None, None, answer)


def _content(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [an_object(part) for part in cast(list[object], value)]
        if all(part is not None and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts if part is not None)
    raise Malformed(f"the answer's content is {kind(value)}, neither a text nor a list of texts")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _calls(value: object) -> list[dict[str, Any]] | None:
    if value is None or value in ("", []):
        return None
    calls = [an_object(call) for call in parsed_list(value, "tool_calls")]
    if any(call is None for call in calls):
        raise Malformed("tool_calls holds something else than objects")
    return [_without_nulls(call) for call in calls if call is not None]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in cast(dict[str, Any], value).items() if one is not None}
    return [_without_nulls(one) for one in cast(list[Any], value)] if isinstance(value, list) else value


def _usage(place: Fields) -> dict[str, Any] | None:
    return an_object(place.get("usage"))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else -1


def _finish_reason(places: Sequence[Fields]) -> str | None:
    said = first(places, ("finish_reason", "stop_reason"))
    reasons = first(places, ("finish_reasons",))
    if said is None and isinstance(reasons, list) and reasons:
        said = cast(list[Any], reasons)[-1]
    if (of_kind := an_object(said)) is not None:  # SGLang's own API says {"type": "stop", "matched": 151645}
        said = of_kind.get("type")
    if said is None:
        return None
    text = str(said)
    if text in COMPLETE:
        return COMPLETE[text]
    if text in CUT:
        return "length"
    raise Refused("finish reason", f"{text!r}: neither an end ({', '.join(COMPLETE)}) nor a cut ({', '.join(CUT)})")


def _ids(places: Sequence[Fields], names: Sequence[str]) -> list[int] | None:
    value = first(places, names)
    if value is None:
        return None
    ids = parsed_list(value, names[0])
    if any(type(one) is not int for one in ids):
        raise Malformed(f"{names[0]} holds something else than whole numbers")
    return ids or None
