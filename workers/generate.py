"""Rows to samples: what is asked for a prompt, and what is kept of the answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import Any

from jinja2 import TemplateError

from draftfleet.errors import BadRequest, ServerError
from draftfleet.logs import event
from draftfleet.records import IdsSource, Sample
from draftfleet.tokens import TargetTokenizer
from draftfleet.training_rows import turn_key
from workers import text_ids
from workers.batch import Batch, Row
from workers.client import Client
from workers.dialects import Ask, Completion, decode
from workers.servers import Server

log = logging.getLogger(__name__)

UNRENDERABLE = (TemplateError, ValueError, TypeError, KeyError)
"""What a chat template answers to a conversation that it was not made for. The server, asked all the same, decides."""


class Generator:
    """Asks servers for rows. `context_tokens` is the target's; the smaller of it and the server's own counts."""

    def __init__(
        self, client: Client, tokenizer: TargetTokenizer | None, *, context_tokens: int | None, worker: str
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._worker = worker

    async def ask(self, row: Row, server: Server) -> Sample:
        """One request. Raises ServerError."""
        content = row.batch.content
        if row.prompt_tokens is None and row.asked.turns:
            await asyncio.to_thread(self._measure, row)
        asked_ids = await self._asked_ids(row, server)
        request = server.dialect.request(
            Ask(
                model=content.model,
                messages=row.asked.messages,
                sampling=row.sampling.model_copy(update={"max_tokens": self._max_tokens(row, server)}),
                tools=row.prompt.tools,
                seed=row_seed(content.sampling.seed, turn_key(row.prompt.row_key, len(row.asked.turns))),
                prompt_token_ids=asked_ids,
            )
        )
        started_at, clock = time.time(), time.monotonic()
        status, headers, raw = await self._client.complete(server.url, *request)
        if status != 200:
            raise server.dialect.classify(status, headers, raw)
        completion = text_ids.read(server.dialect, decode(raw), self._tokenizer, asked_ids)
        seconds = time.monotonic() - clock
        prompt_ids, ids, source = await self._ids(row, completion)
        return Sample(
            **_identity(row),
            outcome=completion.outcome,
            finish_reason=completion.finish_reason,
            reasoning=completion.reasoning,
            reasoning_source=completion.reasoning_source,
            content=completion.content,
            tool_calls=completion.tool_calls,
            prompt_token_ids=prompt_ids,
            token_ids=ids,
            ids_source=source,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            model=completion.model or content.model,
            server=server.url,
            dialect=server.dialect.NAME,
            worker=self._worker,
            started_at=started_at,
            seconds=seconds,
        )

    def refuse(self, row: Row, server: str, fault: ServerError) -> Sample:
        """The record of a row, or of a turn, that ends without an answer. Turns that were finished before are kept."""
        return Sample(
            **_identity(row),
            outcome="failed",
            error=f"prompt {row.prompt.prompt_id} on {server}: {fault}",
            error_status=fault.status,
            error_kind=fault.kind,
            model=row.batch.content.model,
            server=server,
            worker=self._worker,
            started_at=time.time(),
        )

    def rows(self, batch: Batch) -> list[Row]:
        """The rows of a batch that are still to be asked, with the length of their prompts where it can be known."""
        prompts = [prompt for prompt in batch.prompts if prompt.row_key not in batch.finished]
        rows = [Row(batch, prompt) for prompt in prompts]
        for row in rows:
            self._measure(row)
        return rows

    def _measure(self, row: Row) -> None:
        """Note the length of what is asked, where it can be known."""
        if self._tokenizer is None:
            return
        try:
            row.prompt_tokens = len(text_ids.prompt_ids(self._tokenizer, row.asked, row.sampling))
        except UNRENDERABLE as error:
            log.warning(event("prompt not rendered", row=row.prompt.row_key, error=type(error).__name__))

    def _max_tokens(self, row: Row, server: Server) -> int:
        """As many as the run pins, fewer where the context ends before. Raises BadRequest where nothing fits."""
        wanted = row.sampling.max_tokens
        known = (self._context_tokens, server.context_tokens)
        context = min((tokens for tokens in known if tokens is not None), default=None)
        if context is None or row.prompt_tokens is None:
            return wanted
        if row.prompt_tokens >= context:
            raise BadRequest(
                f"prompt {row.prompt.prompt_id} has {row.prompt_tokens} tokens and the context of {server.url} holds "
                f"{context}: nothing is left for an answer. Serve the target with a longer context, or leave it out."
            )
        return min(wanted, context - row.prompt_tokens)

    async def _asked_ids(self, row: Row, server: Server) -> list[int] | None:
        """The prompt, where this server is asked with ids. Raises BadRequest where the template cannot render it."""
        if not server.dialect.WANTS_PROMPT_IDS or self._tokenizer is None:
            return None
        try:
            return await asyncio.to_thread(text_ids.prompt_ids, self._tokenizer, row.asked, row.sampling)
        except UNRENDERABLE as error:
            raise BadRequest(
                f"the chat template of target.path cannot render this conversation ({error}), and "
                f"{server.dialect.NAME} is asked with ids: correct the data, or let the server render it "
                '(worker.dialect = "auto")'
            ) from None

    async def _ids(self, row: Row, completion: Completion) -> tuple[list[int], list[int], IdsSource]:
        """The engine's ids, else the tokenizer's, else none."""
        prompt_ids, ids = completion.prompt_token_ids, completion.token_ids
        if self._tokenizer is None or row.prompt_tokens is None:
            return prompt_ids or [], ids or [], "none" if ids is None else "engine"
        asked = self._tokenizer, row.asked, row.sampling
        if prompt_ids is None:
            prompt_ids = await asyncio.to_thread(text_ids.prompt_ids, *asked)
        if ids is not None:
            return prompt_ids, ids, "engine"
        return prompt_ids, await asyncio.to_thread(text_ids.retokenized, *asked, completion), "retokenized"


def row_seed(seed: int | None, row_key: str) -> int | None:
    """A seed of its own for each row: one for all would make the answers to equal prompts equal."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_key}".encode()).digest()[:4]) >> 1


def _identity(row: Row) -> dict[str, Any]:
    batch, prompt = row.batch, row.prompt
    return {
        "run_id": batch.run.run_id,
        "run": batch.run.name,
        "batch": batch.name,
        "row_key": prompt.row_key,
        "prompt_id": prompt.prompt_id,
        "split": prompt.split,
        "messages": row.asked.messages,
        "tools": prompt.tools,
        "sample": prompt.sample,
        "drawn": batch.content.drawn(prompt.row_key),
        "turns": row.asked.turns,
        "attempt": batch.attempt,
        "source": prompt.source,
    }
