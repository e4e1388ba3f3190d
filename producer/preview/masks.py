"""A prompt as the model will see it, and what of it is trained on: `draftfleet produce --dry-run` shows it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise

from draftfleet.records import Conversation, Prompt
from draftfleet.settings import Sampling
from draftfleet.tokens import CLOSE, OPEN, TargetTokenizer
from producer.preview.lengths import UNRENDERABLE, prompt_text
from producer.preview.survey import answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer that the target is asked for. `prompt` is the text before it, to the character: it is not trained on.

    `follows` where it is what the one before showed, prompt and completion, and `prompt` what comes after. `completion`
    stands where the answer will, which is trained on: the source's own answer where it has one, else nothing.
    """

    number: int
    of: int
    follows: bool = False
    prompt: str
    completion: str = ""
    end: str
    in_thought: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A prompt to be shown. `fault` says why it could not be rendered; without a tokenizer it is not.

    `tools_unseen`: the template writes none of its tools, so the model does not know of them.
    """

    prompt_id: str
    split: str
    source: str
    messages: int
    tools: int
    tools_unseen: bool = False
    tokens: int | None = None
    rendered: bool
    fault: str = ""
    asks: list[Ask] = field(default_factory=list[Ask])


class Picks:
    """The first prompt, the first with earlier answers, the first with tools; then others in order, up to `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._first: list[Prompt] = []
        self._wanted: dict[str, Prompt] = {}

    def add(self, prompt: Prompt) -> None:
        if len(self._first) < self._most:
            self._first.append(prompt)
        if "turns" not in self._wanted and any(message["role"] == "assistant" for message in prompt.messages):
            self._wanted["turns"] = prompt
        if "tools" not in self._wanted and prompt.tools:
            self._wanted["tools"] = prompt

    def chosen(self) -> list[Prompt]:
        found = {prompt.prompt_id: prompt for prompt in [*self._first[:1], *self._wanted.values(), *self._first]}
        return list(found.values())[: self._most]


def shown(prompt: Prompt, tokenizer: TargetTokenizer | None, sampling: Sampling, *, every_turn: bool) -> Shown:
    """As it will be asked: the last turn, or each assistant turn on what came before it."""
    head = Shown(
        prompt_id=prompt.prompt_id,
        split=prompt.split,
        source=prompt.source,
        messages=len(prompt.messages),
        tools=len(prompt.tools or ()),
        rendered=tokenizer is not None,
    )
    spans = answers(prompt.messages) if every_turn else []
    if tokenizer is None:
        return replace(head, asks=_unrendered(prompt, spans))
    asks: list[Ask] = []
    text = ""
    try:
        for number, span in enumerate([*spans, None]):
            upto = prompt.messages[: span.start] if span else prompt.messages
            text = prompt_text(tokenizer, replace(prompt, messages=upto), sampling)
            whole = asks[-1].prompt + asks[-1].completion + asks[-1].end if asks else ""
            asks.append(
                Ask(
                    number=number + 1,
                    of=len(spans) + 1,
                    prompt=text,
                    completion=_answer(prompt.messages[span.start : span.stop]) if span else "",
                    end=tokenizer.end_of_turn,
                    in_thought=text.rstrip().endswith(OPEN),
                    follows=bool(whole) and text.startswith(whole),
                )
            )
    except UNRENDERABLE as error:
        return replace(head, fault=f"the chat template refuses it: {error}")
    unseen = bool(prompt.tools) and prompt_text(tokenizer, replace(prompt, tools=None), sampling) == text
    [tokens] = tokenizer.lengths([asks[-1].prompt])
    return replace(head, tokens=tokens, tools_unseen=unseen, asks=_without_repetition(asks))


def _without_repetition(asks: list[Ask]) -> list[Ask]:
    """Where a text goes on from the one before, only what comes after it."""
    short = asks[:1]
    for before, ask in pairwise(asks):
        begun = len(before.prompt) + len(before.completion) + len(before.end)
        short.append(replace(ask, prompt=ask.prompt[begun:]) if ask.follows else ask)
    return short


def _unrendered(prompt: Prompt, spans: list[range]) -> list[Ask]:
    """Role and content of each message: what there is where nobody knows the template."""
    asks: list[Ask] = []
    begin = 0
    for number, span in enumerate([*spans, None]):
        messages = prompt.messages[begin : span.start] if span else prompt.messages[begin:]
        text = "".join(f"[{message['role']}] {_answer([message])}\n" for message in messages)
        answer = _answer(prompt.messages[span.start : span.stop]) if span else ""
        asks.append(
            Ask(number=number + 1, of=len(spans) + 1, prompt=text, completion=answer, end="", follows=number > 0)
        )
        begin = span.stop if span else begin
    return asks


def _answer(messages: Conversation) -> str:
    """What messages say, as text."""
    return "\n".join(part for message in messages for part in _parts(message))


def _parts(message: dict[str, object]) -> list[str]:
    content = message.get("content")
    texts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
    if thought := message.get("reasoning_content"):
        texts = [f"{OPEN}\n{thought}\n{CLOSE}\n", *texts]
    calls = message.get("tool_calls")
    return [*texts, f"tool calls: {json.dumps(calls, ensure_ascii=False)}"] if calls else texts
