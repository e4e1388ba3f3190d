"""The target's tokenizer: prompt ids, and the ids of a completion whose server did not tell them. Needs no torch.

A completion without ids is written out as text again and tokenized. What its text does not say (whether the thought was
opened and closed, the white space around it, the stop token) is unknown, so several texts are candidates and the
server's own count of completion tokens chooses among them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from draftfleet.errors import TargetError
from draftfleet.records import Conversation

JSON = dict[str, Any]
OPEN, CLOSE = "<think>", "</think>"


class TargetTokenizer:
    """Made by `load`."""

    def __init__(self, path: str, tokenizer: Any) -> None:
        self.path = path
        self.vocab_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._template = str(tokenizer.get_chat_template())
        self.end_of_turn = self._end_of_turn()

    def prompt_ids(
        self,
        messages: Conversation,
        tools: list[JSON] | None = None,
        thinking: bool | None = None,
        template_kwargs: JSON | None = None,
    ) -> list[int]:
        """The ids that a server gives the model before the first token of its answer.

        `template_kwargs` are those of the request's `chat_template_kwargs`; they win over `thinking`.
        """
        return self.encode(self._render(messages, tools, _switches(thinking, template_kwargs)))

    def prompt_text(
        self,
        messages: Conversation,
        tools: list[JSON] | None = None,
        thinking: bool | None = None,
        template_kwargs: JSON | None = None,
    ) -> str:
        """The text behind `prompt_ids`: what the model reads before the first token of its answer."""
        return self._render(messages, tools, _switches(thinking, template_kwargs))

    def lengths(self, texts: list[str]) -> list[int]:
        """How many ids `encode` gives for each; all cores take part."""
        if not texts:
            return []
        batch = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return [len(ids) for ids in cast(list[list[int]], batch["input_ids"])]

    @property
    def special_texts(self) -> list[str]:
        """The tokens that no text of a person holds, as the template spells them."""
        known = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        return sorted(self.decode([token]) for token in known)

    def completion_ids(
        self,
        messages: Conversation,
        *,
        reasoning: str | None,
        content: str | None,
        tool_calls: list[JSON] | None = None,
        finish_reason: str | None,
        completion_tokens: int,
        tools: list[JSON] | None = None,
        thinking: bool | None = None,
        template_kwargs: JSON | None = None,
    ) -> list[int]:
        """The ids of an answer, its stop token included unless it was cut at its length.

        The first candidate of `completion_tokens` ids; where none has that many, the first candidate, whose count then
        tells that the row is not to be trained on. The first, too, where nobody counted: -1.
        """
        switches = _switches(thinking, template_kwargs)
        answer: JSON = {"role": "assistant", "content": content or "", "reasoning_content": reasoning or ""}
        if tool_calls:
            answer["tool_calls"] = tool_calls
        first: list[int] | None = None
        for text in self._candidates(messages, answer, tools, switches, cut=finish_reason == "length"):
            ids = self.encode(text)
            if completion_tokens in (len(ids), -1):
                return ids
            first = ids if first is None else first
        return first or []

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def fingerprint(self) -> str:
        """Hash of vocabulary, rules and chat template: where it is equal, the same messages give the same ids."""
        rules = json.loads(self._tokenizer.backend_tokenizer.to_str())
        # Where a text is cut or padded is a setting of the caller, not of the tokenizer.
        rules |= {"truncation": None, "padding": None}
        canonical = json.dumps([rules, self._template], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    def _candidates(
        self, messages: Conversation, answer: JSON, tools: list[JSON] | None, switches: JSON, *, cut: bool
    ) -> Iterator[str]:
        """Texts that the answer may have been, the likeliest first: as the template writes it, then as models do."""
        prompt = self._render(messages, tools, switches)
        reasoning, content = answer["reasoning_content"], answer["content"]
        is_open = prompt.rstrip().endswith(OPEN)
        if reasoning[:1].isspace() or content[:1].isspace():
            # The server strips nothing, so what stands between the marks is known.
            texts = _raw(reasoning, content, start="" if is_open else OPEN)
        else:
            texts = _stripped(reasoning, content, start="" if is_open else f"{OPEN}\n", cut=cut)
            # A template writes whole turns: an empty thought where there was none, an end where the answer was cut.
            rendered = self._render([*messages, answer], tools, switches, generation_prompt=False)
            if rendered.startswith(prompt) and (answer.get("tool_calls") or (reasoning and content)):
                texts = [rendered[len(prompt) :].partition(self.end_of_turn)[0], *texts]
        end = "" if cut else self.end_of_turn
        yield from (text + end for text in texts)

    def _render(
        self, messages: Conversation, tools: list[JSON] | None, switches: JSON, *, generation_prompt: bool = True
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            [_plain(message) for message in messages],
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **switches,
        )
        return cast(str, text)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, where special tokens may be spelled out."""
        return cast(list[int], self._tokenizer.encode(text, add_special_tokens=False))

    def _end_of_turn(self) -> str:
        """The special token with which the template ends an assistant's turn."""
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "draftfleet"}]
        tail = self._render(turn, None, {}, generation_prompt=False).rpartition("draftfleet")[2]
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        found = next((token for token in self.encode(tail) if token in special), None)
        return self.decode([found]) if found is not None else str(self._tokenizer.eos_token or "")


def load(path: str | Path) -> TargetTokenizer:
    """The tokenizer in a folder, or of a name on the hub. Raises TargetError if there is none, or no chat template."""
    # Imported here: no other module of the contract needs it. This import reaches no torch, where that of AutoTokenizer
    # imports an installed one (transformers 5.24: 3.5 s against 0.6 s, and 300 MB).
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TargetError(
            f"target.path = {str(path)!r} has no tokenizer that can be read ({error}): "
            "name the folder that holds the target's tokenizer.json, or its name on the hub."
        ) from None
    try:
        return TargetTokenizer(str(path), tokenizer)
    except ValueError as error:
        raise TargetError(
            f"target.path = {str(path)!r}: its tokenizer has no chat template ({error}): "
            "the target must be a chat model; put its chat_template.jinja beside tokenizer.json."
        ) from None


def context_tokens(path: str | Path) -> int | None:
    """The longest sequence the model was made for, from its config.json; None if that is not there or does not say."""
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    # A model of text and images has a part of its own for text.
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    said = [cast(JSON, part).get("max_position_embeddings") for part in parts if isinstance(part, dict)]
    return next((tokens for tokens in said if isinstance(tokens, int)), None)


def _switches(thinking: bool | None, template_kwargs: JSON | None) -> JSON:
    return ({} if thinking is None else {"enable_thinking": thinking}) | (template_kwargs or {})


def _raw(reasoning: str, content: str, *, start: str) -> list[str]:
    if not reasoning:
        return [content]
    if content:
        return [f"{start}{reasoning}{CLOSE}{content}"]
    return [f"{start}{reasoning}", reasoning, f"{start}{reasoning}{CLOSE}"]


def _stripped(reasoning: str, content: str, *, start: str, cut: bool) -> list[str]:
    if not reasoning:
        return [content, f"{start}\n{CLOSE}\n\n{content}"]
    if content:
        return [f"{start}{reasoning}\n{CLOSE}\n\n{content}", f"{start}{reasoning}{CLOSE}\n\n{content}"]
    # vLLM takes an answer that never opened its thought for a thought.
    texts = [f"{start}{reasoning}", reasoning]
    if cut:
        # What one more token would be, a space, a line break or the closing mark, nobody can tell.
        return texts
    return texts + [f"{start}{reasoning}{rest}" for rest in ("\n", f"\n{CLOSE}", f"\n{CLOSE}\n\n", CLOSE)]


def _plain(message: JSON) -> JSON:
    """A message as templates want it: content is text, the arguments of tool calls are an object."""
    content = message.get("content")
    if isinstance(content, list):
        parts = cast(list[JSON], content)
        content = "\n".join(str(part.get("text", "")) for part in parts)
    plain = {**message, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: JSON) -> JSON:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a model wrote it: it stays text where it is no JSON
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
