"""What is asked next of a conversation: pure functions. docs/conversations.md says the rules.

    source    user  A1        tool(1)       user  A2   user        the assistant's turns are the source's
    asked 1   user                                                 -> answered T1
    asked 2   user  T1        tool(1)       user                   -> answered T2
    asked 3   user  T1        tool(1)       user  T2   user

Of the source only what the target is told is kept: users, tools, and the system. A tool's result is put behind the call
of T1 that stands for its call in A1, and carries the id of that one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from draftfleet.conversations import answers
from draftfleet.records import Conversation, Prompt, Sample, Turn

Message = dict[str, Any]

CALLS_DIFFER = "the target's tool calls differ from the source's"
NO_CALL = "the source has tool results that answer none of its calls"
CUT = "the answer was cut at its length"
FAILED = "the target gave no answer"


def first(prompt: Prompt, begun: Sample | None) -> Prompt:
    """The turn that is asked first; after those that an earlier holder finished, where there are any."""
    if begun is not None:
        return _next(prompt, begun.messages, begun.turns)
    left = answers(prompt.messages)[len(prompt.turns) :]
    return replace(prompt, messages=prompt.messages[: left[0].start]) if left else prompt


def following(prompt: Prompt, asked: Prompt, answer: Sample) -> Prompt | str | None:
    """The turn to be asked after an answer; why the conversation ends before the source's does; None at its end."""
    spans = answers(prompt.messages)
    number = len(asked.turns)
    if number >= len(spans):
        return None
    where = f"at turn {number + 1} of {len(spans) + 1}"
    if answer.outcome == "truncated":
        return f"{CUT} {where}"
    if answer.outcome != "ok":
        return f"{FAILED} {where}"
    span = spans[number]
    end = spans[number + 1].start if number + 1 < len(spans) else len(prompt.messages)
    message = _message(answer)
    calls = [call for one in prompt.messages[span.start : span.stop] for call in one.get("tool_calls") or ()]
    context = spliced(prompt.messages[span.stop : end], calls, message.get("tool_calls") or [])
    if isinstance(context, str):
        return f"{context} {where}"
    return _next(prompt, [*asked.messages, message, *context], [*asked.turns, _turn(answer, len(asked.messages))])


def unfinished(answer: Sample, asked: Prompt) -> Sample:
    """The record of a conversation that goes on: its finished turns, and what is asked next. For partials alone."""
    return Sample(
        run_id=answer.run_id,
        run=answer.run,
        batch=answer.batch,
        row_key=answer.row_key,
        prompt_id=answer.prompt_id,
        split=answer.split,
        messages=asked.messages,
        tools=asked.tools,
        outcome="unfinished",
        model=answer.model,
        worker=answer.worker,
        attempt=answer.attempt,
        started_at=answer.started_at,
        sample=answer.sample,
        drawn=answer.drawn,
        turns=asked.turns,
    )


def spliced(context: Conversation, source_calls: list[Message], calls: list[Message]) -> Conversation | str:
    """What the source holds between two answers, with its tool results behind these calls; or why that cannot be.

    Results come in the order of the calls: a template without ids tells them apart by nothing else.
    """
    places = [number for number, message in enumerate(context) if message["role"] == "tool"]
    results = _results_by_call([context[place] for place in places], source_calls)
    if results is None:
        return NO_CALL
    stands_for = _matched(calls, source_calls)
    if stands_for is None:
        return CALLS_DIFFER
    told = [
        _result(results[source], call)
        for call, source in zip(calls, stands_for, strict=True)
        if source in results  # the source may leave a call without a result
    ]
    in_order = dict(zip(places, told, strict=True))
    return [in_order.get(number, message) for number, message in enumerate(context)]


def _results_by_call(results: list[Message], calls: list[Message]) -> dict[int, Message] | None:
    """By the number of its call each result: by id where both have one, else by name, else in order.

    None where a result answers no call, or one that another has answered.
    """
    has_ids = any(call.get("id") for call in calls)
    found: dict[int, Message] = {}
    for result in results:
        identity, name = result.get("tool_call_id"), result.get("name")
        free = [number for number in range(len(calls)) if number not in found]
        if identity and has_ids:
            free = [number for number in free if calls[number].get("id") == identity]
        elif name:
            free = [number for number in free if _name(calls[number]) == name]
        if not free:
            return None
        found[free[0]] = result
    return found


def _matched(calls: list[Message], source_calls: list[Message]) -> list[int] | None:
    """Of each call the number of the source's call that it stands for; None unless each stands for one other.

    By function; of several calls of one function first those with equal arguments, then in order.
    """
    if sorted(map(_name, calls)) != sorted(map(_name, source_calls)):
        return None
    found: dict[int, int] = {}
    free = dict(enumerate(source_calls))
    same: Sequence[Callable[[Message, Message], bool]] = (_is_equal, lambda one, other: _name(one) == _name(other))
    for is_same in same:
        for number, call in enumerate(calls):
            if number in found:
                continue
            source = next((key for key, other in free.items() if is_same(call, other)), None)
            if source is not None:
                found[number] = source
                del free[source]
    return [found[number] for number in range(len(calls))]


def _result(result: Message, call: Message) -> Message:
    """A tool's result as that of another call."""
    named = {"name": _name(call)} if "name" in result else {}
    return {**result, **named, "tool_call_id": call["id"]}


def _is_equal(one: Message, other: Message) -> bool:
    return (_name(one), _arguments(one)) == (_name(other), _arguments(other))


def _name(call: Message) -> str:
    return str((call.get("function") or call).get("name", ""))


def _arguments(call: Message) -> str:
    """As canonical JSON: one server writes spaces, another does not."""
    arguments = (call.get("function") or call).get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return arguments
    return json.dumps(arguments, sort_keys=True)


def _message(answer: Sample) -> Message:
    """The answer as a message of the conversation. A thought that is all of it leaves the content empty, not null:
    not every server takes null."""
    message: Message = {"role": "assistant", "content": answer.content or ""}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {**call, "id": call.get("id") or f"call_{number}"} for number, call in enumerate(answer.tool_calls)
        ]
    return message


def _turn(answer: Sample, place: int) -> Turn:
    return Turn(
        message=place,
        finish_reason=answer.finish_reason,
        reasoning_source=answer.reasoning_source,
        prompt_token_ids=answer.prompt_token_ids,
        token_ids=answer.token_ids,
        ids_source=answer.ids_source,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        server=answer.server,
        seconds=answer.seconds,
    )


def _next(prompt: Prompt, messages: Conversation, turns: list[Turn]) -> Prompt:
    """An answer that is to be continued is of the first turn that is asked, and of no other."""
    unfinished = prompt.unfinished if len(turns) == len(prompt.turns) else None
    return replace(prompt, messages=messages, turns=turns, unfinished=unfinished)
