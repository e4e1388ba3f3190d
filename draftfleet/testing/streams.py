"""Answers that are streamed, as events: what the engine has made by now, looked at every few milliseconds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from draftfleet.testing.answers import Answer
from draftfleet.testing.behaviour import Behaviour, Kind
from draftfleet.testing.speculation import Verified

PIECE_S = 0.005
DONE = b"data: [DONE]\n\n"


class Stream:
    """The events of one answer. Its text is spread evenly over its tokens. `kind` is the fault that spoils it."""

    def __init__(
        self,
        behaviour: Behaviour,
        asked: dict[str, Any],
        answer: Answer,
        *,
        number: int,
        native: bool,
        kind: Kind | None,
    ) -> None:
        self._shape = behaviour.shape
        self._model = behaviour.model
        self._asked = asked
        self.answer = answer
        self._number = number
        self._native = native
        self._kind = kind
        self._ids = answer.token_ids.numbers()
        self._texts = [("reasoning", answer.reasoning or ""), ("content", answer.content or "")]
        self._sent = 0

    @property
    def is_cut(self) -> bool:
        """It breaks off before its end."""
        return self._kind == "cut"

    def pieces(self, made: int) -> Iterator[bytes]:
        """What came since the last call, if anything did, up to so many tokens in all."""
        before, self._sent = self._sent, max(self._sent, min(made, len(self._ids)))
        if self._sent == before:
            return
        if self._native:
            yield _event({"output_ids": self._ids[: self._sent], **self._meta(None, None)})
            return
        delta = {self._name(field): text for field, text in self._between(before, self._sent) if text}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        more: dict[str, Any] = {}
        if self._gives_ids:
            choice["token_ids"] = self._ids[before : self._sent]
            more = {} if before else {"prompt_token_ids": self.answer.prompt_ids.numbers()}
        yield _event(self._chunk([choice]) | more)

    def end(self, verified: Verified | None) -> Iterator[bytes]:
        """What is left, how it ended, what it took."""
        yield from self.pieces(len(self._ids))
        reason = "abort" if self._kind == "abort" else self.answer.finish_reason
        if self._native:
            yield _event({"output_ids": self._ids, **self._meta(reason, verified)})
        else:
            yield _event(self._chunk([{"index": 0, "delta": {}, "finish_reason": reason}]))
            wants_usage = (self._asked.get("stream_options") or {}).get("include_usage")
            if wants_usage and self._kind != "no_usage":
                usage = {"prompt_tokens": self.answer.prompt_ids.count, "completion_tokens": len(self._ids)}
                yield _event(self._chunk([]) | {"usage": usage})
        yield DONE

    @property
    def _gives_ids(self) -> bool:
        return self._shape == "vllm" and bool(self._asked.get("return_token_ids")) and self._kind != "no_ids"

    def _name(self, field: str) -> str:
        return field if field == "content" or self._shape in ("vllm", "ollama") else "reasoning_content"

    def _between(self, begin: int, end: int) -> Iterator[tuple[str, str]]:
        total = sum(len(text) for _, text in self._texts)
        first, last = (total * place // max(len(self._ids), 1) for place in (begin, end))
        for field, text in self._texts:
            yield field, text[max(first, 0) : max(last, 0)]
            first, last = first - len(text), last - len(text)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self._number}", "object": "chat.completion.chunk", "created": int(time.time())}
        return {**head, "model": self._model, "choices": choices}

    def _meta(self, reason: str | None, verified: Verified | None) -> dict[str, Any]:
        counts = {"prompt_tokens": self.answer.prompt_ids.count, "completion_tokens": self._sent}
        meta: dict[str, Any] = {"id": str(self._number), "finish_reason": reason and {"type": reason}, **counts}
        if verified is not None:
            meta |= {
                "spec_verify_ct": verified.passes,
                "spec_num_correct_drafts": verified.correct,
                "spec_num_proposed_drafts": verified.passes * (len(verified.histogram) - 1),
                "spec_correct_drafts_histogram": verified.histogram,
            }
        return {"meta_info": meta}


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"
