"""What is asked, as engines spell it: sampling, the history of a conversation, the switches of the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from draftfleet.errors import Mismatch
from draftfleet.records import Conversation
from draftfleet.settings import Sampling
from workers.dialects import Ask

KNOBS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
)
"""Of `Sampling`, what is sent as it is: vLLM's names, which most servers share."""

OF_CHAT_ALONE = {"chat_template_kwargs", "chat_template", "tools", "tool_choice", "messages", "reasoning_effort"}
"""Fields of a request that a prompt of ids has no use for."""


def chat(ask: Ask, *, reasoning: Sequence[str] = ("reasoning_content",)) -> dict[str, Any]:
    """The body of a chat request, without `extra_body`. Earlier reasoning is written under each of the given names."""
    body: dict[str, Any] = {
        "model": ask.model,
        "messages": history(ask.messages, reasoning),
        "max_tokens": ask.sampling.max_tokens,
    }
    return body | knobs(ask) | ({"tools": ask.tools} if ask.tools else {})


def knobs(ask: Ask) -> dict[str, Any]:
    """Every knob that is set, and the seed of this row."""
    values = {name: getattr(ask.sampling, name) for name in KNOBS} | {"seed": ask.seed}
    return {name: value for name, value in values.items() if value is not None and value != []}


def renamed(knobs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in knobs.items()}


def history(messages: Conversation, reasoning: Sequence[str]) -> Conversation:
    """Messages on the wire: arguments of tool calls as JSON text, no empty fields, reasoning under its engine's names.

    A turn of tool calls alone has `content: null`; one that ended in its thought has an empty text, since some servers
    want one of the two.
    """
    return [_message(message, reasoning) for message in messages]


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` over `body`; of an object that stands in both, such as `chat_template_kwargs`, each key."""
    both = {name: _objects(body.get(name), value) for name, value in extra.items()}
    return {**body, **extra, **{name: value for name, value in both.items() if value is not None}}


def prompt_ids(ask: Ask, server: str) -> list[int]:
    """Raises Mismatch where they are not known."""
    if ask.prompt_token_ids is None:
        raise Mismatch(
            f"{server} is asked with token ids, and target.path is not set: name the folder or hub name of the target "
            "there, so that its chat template can make them."
        )
    return ask.prompt_token_ids


def refuse(sampling: Sampling, reasons: Mapping[str, str]) -> None:
    """Raise Mismatch if the run asks for what this server cannot do, rather than let it be dropped without a word."""
    asked = sampling.model_dump(include=set(reasons), exclude_none=True)
    for variant in sampling.mixture:
        asked |= variant.model_dump(include=set(reasons), exclude_none=True)
    for name, value in asked.items():
        if value != []:
            raise Mismatch(
                f"sampling.{name} = {value!r}: {reasons[name]}. Leave it out in a new run, or serve the model "
                "with vLLM, SGLang or llama.cpp."
            )


def _message(message: Mapping[str, Any], reasoning: Sequence[str]) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if value is not None and value != []}
    thought = plain.pop("reasoning_content", None) or plain.pop("reasoning", None)
    plain.pop("reasoning", None)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
        plain.setdefault("content", None)
    plain.setdefault("content", "")
    return plain | (dict.fromkeys(reasoning, thought) if thought else {})


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return dict(call)
    function = cast(dict[str, Any], function)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": text}}


def _objects(below: object, above: object) -> dict[str, Any] | None:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**cast(dict[str, Any], below), **cast(dict[str, Any], above)}
    return None
