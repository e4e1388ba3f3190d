"""Lets each server try a run, with one real prompt, before it gets the run's rows (canary.py says what it looks at)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from draftfleet.errors import BadRequest, DraftfleetError, Mismatch, Overload, Transient, Unauthorized
from draftfleet.logs import event
from draftfleet.records import Prompt
from draftfleet.tokens import TargetTokenizer
from workers import canary
from workers.batch import Batch, Row
from workers.client import Client
from workers.servers import Server, Servers

log = logging.getLogger(__name__)

PROMPTS_TRIED = 3
AGAIN_S = 2.0
OUR_OWN = Prompt("0" * 32, "train", [{"role": "user", "content": canary.QUESTION}])


class Clearance:
    """`on_change` is called when a server was cleared, `fatal` with the error that must stop the worker."""

    def __init__(
        self,
        client: Client,
        servers: Servers,
        tokenizer: TargetTokenizer | None,
        fatal: Callable[[DraftfleetError], object],
        *,
        request_timeout_s: float,
        context_tokens: int | None,
    ) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._client = client
        self._servers = servers
        self._tokenizer = tokenizer
        self._fatal = fatal
        self._request_timeout_s = request_timeout_s
        self._context_tokens = context_tokens
        self._trying: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._broke_off: set[tuple[str, str]] = set()

    def start(self, server: Server, batch: Batch, rows: Sequence[Row]) -> None:
        """Begin the trial, unless it is under way. The shortest prompts are tried: they are the last to be refused."""
        key = server.url, batch.run.run_id
        if key in self._trying or server.held_s:
            return
        # After an answer that broke off a server shows with a question of our own that it is well: no row may be what
        # keeps it away.
        is_to_recover = server.rests or key in self._broke_off
        task = asyncio.create_task(self._try(server, batch, [OUR_OWN] if is_to_recover else self._prompts(rows)))
        server.trials += 1
        self._trying[key] = task
        task.add_done_callback(lambda _: self._ended(server, key))

    def _prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """The shortest that the tokenizer can render; a question of our own where it can render none."""
        known = [row.asked for row in rows if self._tokenizer is None or row.prompt_tokens is not None]
        known.sort(key=lambda prompt: sum(map(_length, prompt.messages)))
        return known[:PROMPTS_TRIED] or [OUR_OWN]

    def cancel(self) -> None:
        for task in self._trying.values():
            task.cancel()

    def recall(self, server: Server) -> None:
        """Give up what this server is being asked."""
        for (url, _), task in self._trying.items():
            if url == server.url:
                task.cancel()

    def _ended(self, server: Server, key: tuple[str, str]) -> None:
        server.trials -= 1
        del self._trying[key]
        self.on_change()

    async def _try(self, server: Server, batch: Batch, prompts: Sequence[Prompt]) -> None:
        try:
            refusal = await self._first_answered(server, batch, prompts)
        except (Mismatch, Unauthorized) as error:
            if await self._servers.confirm(server):
                self._fatal(error)
        except Overload as error:
            await asyncio.sleep(server.overloaded(error.retry_after_s))
        except Transient as error:
            log.warning(event("canary broke off", server=server.url, run=batch.run.name, error=error.summary))
            self._broke_off.add((server.url, batch.run.run_id))
            if await self._servers.confirm(server):
                self._servers.failed_trial(server, error)
            await asyncio.sleep(AGAIN_S)
        except Exception as error:
            log.exception(event("canary raised", server=server.url, run=batch.run.name))
            self._fatal(Mismatch(f"the canary on {server.url} ended with {error!r}: see the log."))
        else:
            if refusal and len(prompts) == PROMPTS_TRIED:
                self._fatal(
                    Mismatch(
                        f"server {server.url} refused the {PROMPTS_TRIED} shortest prompts of batch {batch.name}; the "
                        f"last: {refusal.summary}. Correct the run's [sampling], or the server. It said",
                        body=refusal.body,
                    )
                )
            else:
                self._broke_off.discard((server.url, batch.run.run_id))
                server.cleared.add(batch.run.run_id)

    async def _first_answered(self, server: Server, batch: Batch, prompts: Sequence[Prompt]) -> BadRequest | None:
        """The last refusal, if every prompt was refused: fewer prompts than it takes to blame the server are let pass,
        their own rows will say what is wrong."""
        refusal: BadRequest | None = None
        for prompt in prompts:
            try:
                report = await canary.check(
                    partial(self._client.complete, server.url),
                    server=server.url,
                    dialect=server.dialect,
                    models=server.models,
                    model=batch.content.model,
                    sampling=batch.content.sampling,
                    prompt=prompt,
                    tokenizer=self._tokenizer,
                    request_timeout_s=self._request_timeout_s,
                    context_tokens=self._context_tokens,
                )
            except BadRequest as error:
                refusal = error
                continue
            self._say(batch, report)
            return None
        return refusal

    def _say(self, batch: Batch, report: canary.CanaryReport) -> None:
        fields = {"server": report.server, "run": batch.run.name}
        for warning in report.warnings:
            log.warning(event("canary warned", **fields, warning=warning))
        log.info(
            event(
                "canary passed",
                **fields,
                dialect=report.dialect,
                context_tokens=report.context_tokens,
                seconds=report.seconds,
                seconds_per_token=report.seconds_per_token,
            )
        )


def _length(message: dict[str, object]) -> int:
    return len(str(message.get("content") or ""))
