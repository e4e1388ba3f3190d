"""A prompt and a response become a sample: its ids are checked against the text, or made of it.

Nothing is invented: not a count of tokens, not a finish reason, not a stop token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from jinja2 import TemplateError

from draftfleet.errors import RunConflict
from draftfleet.records import Conversation, IdsSource, Outcome, Prompt, Sample, Turn
from draftfleet.runs import Run
from draftfleet.tokens import CLOSE, OPEN, TargetTokenizer
from producer.import_data.responses import Refused, Response, earlier_answer, split_thought

WORKER = DIALECT = "import-data"
UNRENDERABLE = (TemplateError, ValueError, TypeError, KeyError)
"""What a chat template answers to a conversation that it was not made for."""


class Maker:
    """Makes the samples of one run. `trusts_text`: ids that were made of text alone count as those of the model."""

    def __init__(self, run: Run, tokenizer: TargetTokenizer, *, any_model: bool, trusts_text: bool) -> None:
        pinned = run.info.content
        wanted = pinned.get("target.fingerprint")
        if wanted is not None and wanted != tokenizer.fingerprint():
            raise RunConflict(
                f"run {run.name} was made with another tokenizer or chat template than that of {tokenizer.path}: "
                "its ids would be another model's. Name the run's target with --target."
            )
        self._run = run
        self._tokenizer = tokenizer
        self._model = str(pinned["target.model"])
        self._any_model = any_model
        self._trusts_text = trusts_text
        self._thinking: object = pinned.get("sampling.thinking")
        mixture = cast(list[dict[str, Any]], pinned.get("sampling.mixture") or [])
        self._is_mixed = pinned.get("sampling.thinking_share") is not None or any("thinking" in one for one in mixture)
        self._template_kwargs = cast(dict[str, Any], pinned.get("sampling.extra_body") or {}).get(
            "chat_template_kwargs"
        )
        self._stops = {ids[-1] for ids in [tokenizer.encode(tokenizer.end_of_turn)] if ids}

    def prompt_ids(self, prompt: Prompt) -> list[int] | None:
        """None where the template refuses the conversation."""
        try:
            return self._prompt_ids(prompt.messages, prompt.tools, None)
        except UNRENDERABLE:
            return None

    def complete(self, response: Response) -> Response:
        """With the text of its ids, where it has no text. Raises Refused if it is none of this run's."""
        self._check_model(response)
        ids = response.token_ids
        if ids is None:
            return response
        if wrong := [one for one in ids if not 0 <= one < self._tokenizer.vocab_size]:
            raise Refused("token ids", f"{wrong[0]} is not in the vocabulary of {self._tokenizer.vocab_size}")
        text = self._tokenizer.decode(ids)
        if response.finish_reason is None and ids[-1] in self._stops:
            response = replace(response, finish_reason="stop")
        if response.has_text:
            if not _spells(text, response):
                raise Refused("token ids", "they do not spell its text: leave the ids out to have the text tokenized")
            return response
        written = text.removesuffix(self._tokenizer.end_of_turn)
        reasoning, source, content = split_thought([{}], written)
        return replace(response, reasoning=reasoning, reasoning_source=source, content=content or None)

    def sample(self, prompt: Prompt, response: Response, *, batch: str, file: str) -> Sample:
        """Raises Refused if it cannot be the sample of this prompt."""
        try:
            return self._sample(prompt, response, batch, file)
        except UNRENDERABLE as error:
            raise Refused("chat template", f"it refuses the conversation: {type(error).__name__}") from None

    def _sample(self, prompt: Prompt, response: Response, batch: str, file: str) -> Sample:
        if self._thinking is False and not self._is_mixed and response.reasoning:
            raise Refused("reasoning", "the run asks with sampling.thinking = false")
        messages, turns = prompt.messages, list[Turn]()
        if self._run.info.content.get("producer.turns") == "all" and response.asked is not None:
            messages = response.asked.messages
            turns = [self._turn(messages, number, prompt, response, file) for number in _earlier_turns(messages)]
        prompt_ids = self._prompt_ids(messages, prompt.tools, response)
        if response.prompt_token_ids not in (None, prompt_ids):
            raise Refused("prompt ids", "its prompt was another: they are not those of the run's template and settings")
        ids, source, completion_tokens = self._ids(messages, prompt.tools, response, prompt_ids)
        return Sample(
            run_id=self._run.run_id,
            run=self._run.name,
            batch=batch,
            row_key=prompt.row_key,
            prompt_id=prompt.prompt_id,
            split=prompt.split,
            messages=messages,
            tools=prompt.tools,
            sample=prompt.sample,
            source=prompt.source,
            drawn={"thinking": bool(response.reasoning)} if self._is_mixed else None,
            turns=turns,
            outcome=_outcome(response),
            finish_reason=response.finish_reason,
            reasoning=response.reasoning,
            reasoning_source=response.reasoning_source,
            content=response.content,
            tool_calls=response.tool_calls,
            prompt_token_ids=prompt_ids,
            token_ids=ids,
            ids_source=source,
            prompt_tokens=len(prompt_ids),
            completion_tokens=completion_tokens,
            model=response.model or self._model,
            server=f"imported:{file}",
            dialect=DIALECT,
            worker=WORKER,
        )

    def _check_model(self, response: Response) -> None:
        said = response.model
        if said is None or self._any_model or _last(said) == _last(self._model):
            return
        raise Refused(f"model {said[:60]}", f"the run is of {self._model}; --any-model takes it all the same")

    def _prompt_ids(self, messages: Conversation, tools: Any, response: Response | None) -> list[int]:
        return self._tokenizer.prompt_ids(messages, tools, self._switch(response), self._template_kwargs)

    def _switch(self, response: Response | None) -> bool | None:
        """Where a run asks now with thinking and now without, the answer shows which it was."""
        if self._is_mixed:
            return None if response is None else bool(response.reasoning)
        return self._thinking if isinstance(self._thinking, bool) else None

    def _ids(
        self, messages: Conversation, tools: Any, response: Response, prompt_ids: Sequence[int]
    ) -> tuple[list[int], IdsSource, int]:
        """The ids, where they come from, and how many the model produced, -1 if that cannot be held against them."""
        if response.token_ids is not None:
            said = response.completion_tokens
            return response.token_ids, "engine", len(response.token_ids) if said < 0 else said
        ids = self._verbatim(response, prompt_ids) if response.verbatim else None
        if ids is None:
            ids = self._of_text(messages, tools, response)
        if response.completion_tokens >= 0:
            return ids, "retokenized", response.completion_tokens
        return ids, "retokenized", len(ids) if self._trusts_text else -1

    def _of_text(self, messages: Conversation, tools: Any, response: Response) -> list[int]:
        """Where nobody says how the answer ended, a stop token stands at the end only if the count says so."""
        reasons = [response.finish_reason] if response.finish_reason else ["length", "stop"]
        if response.completion_tokens < 0:
            reasons = reasons[:1]
        found = [
            self._tokenizer.completion_ids(
                messages,
                reasoning=response.reasoning,
                content=response.content,
                tool_calls=response.tool_calls,
                finish_reason=reason,
                completion_tokens=response.completion_tokens,
                tools=tools,
                thinking=self._switch(response),
                template_kwargs=self._template_kwargs,
            )
            for reason in reasons
        ]
        return next((ids for ids in found if len(ids) == response.completion_tokens), found[0])

    def _verbatim(self, response: Response, prompt_ids: Sequence[int]) -> list[int] | None:
        """Of a text in which the thought stood between its tags; None if the tags say it was not all the text."""
        text = response.verbatim or ""
        opens = self._tokenizer.decode(list(prompt_ids[-8:])).rstrip().endswith(OPEN)
        if opens and text.lstrip().startswith(OPEN):
            text = text.lstrip().removeprefix(OPEN)
        elif not opens and CLOSE in text and not text.lstrip().startswith(OPEN):
            return None
        end = "" if response.finish_reason in (None, "length") else self._tokenizer.end_of_turn
        ids = self._tokenizer.encode(text + end)
        with_stop = self._tokenizer.encode(text + self._tokenizer.end_of_turn)
        return with_stop if len(with_stop) == response.completion_tokens and not end else ids

    def _turn(self, messages: Conversation, number: int, prompt: Prompt, last: Response, file: str) -> Turn:
        """An assistant turn before the last: of it only the text is known."""
        calls = messages[number].get("tool_calls")
        answer = earlier_answer(messages[number], cast(Prompt, last.asked), "tool_calls" if calls else None)
        prompt_ids = self._prompt_ids(messages[:number], prompt.tools, answer)
        ids, source, completion_tokens = self._ids(messages[:number], prompt.tools, answer, prompt_ids)
        return Turn(
            message=number,
            finish_reason=answer.finish_reason,
            reasoning_source=answer.reasoning_source,
            prompt_token_ids=prompt_ids,
            token_ids=ids,
            ids_source=source,
            prompt_tokens=len(prompt_ids),
            completion_tokens=completion_tokens,
            server=f"imported:{file}",
        )


def _earlier_turns(messages: Conversation) -> list[int]:
    """What an assistant says before the first user is no answer."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return [number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"]


def _outcome(response: Response) -> Outcome:
    """Where nobody says how it ended, an answer that is only a thought was cut in it."""
    if response.finish_reason is None:
        return "ok" if response.content or response.tool_calls else "truncated"
    return "truncated" if response.finish_reason == "length" else "ok"


def _spells(text: str, response: Response) -> bool:
    """Whether reasoning, content and the names of called tools stand in the text of the ids, one after the other.

    White space is left out: servers strip it.
    """
    text = _packed(text)
    names = [str(call.get("function", {}).get("name", "")) for call in response.tool_calls or ()]
    position = 0
    for said in (response.reasoning, response.content, *names):
        piece = _packed(said or "")
        position = text.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return True


def _packed(text: str) -> str:
    return "".join(text.split())


def _last(name: str) -> str:
    """`Qwen/Qwen3-32B`, `/models/Qwen3-32B` and `Qwen3-32B` are one model."""
    return name.rstrip("/").rpartition("/")[2].casefold()
