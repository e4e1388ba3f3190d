"""The look at a server before the first row is asked of it: is it the target, and are its states what we train on?"""

# T tokens, n layers asked for, D hidden size of the target

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import torch
from torch import Tensor

from draftfleet.errors import Mismatch, ServerError, TargetError
from draftfleet.logs import event
from draftfleet.settings import Settings
from trainer.targets.vllm import states
from trainer.targets.vllm.command import longest_row, serve_command
from trainer.targets.vllm.fetching import states_of
from trainer.targets.vllm.servers import Server, Servers
from trainer.targets.vllm.spool import Spool
from trainer.targets.vllm.states import Form
from trainer.targets.weights import Ends

log = logging.getLogger(__name__)

PROBE_TOKENS = 48
"""Three blocks of a prefix cache, which would take them from there the second time."""

AGAIN_S = 2.0
SAY_EVERY_S = 30.0


class Examiner:
    """`form` is complete once the first server has been looked at."""

    def __init__(self, settings: Settings, ends: Ends, spool: Spool, layers: list[int]) -> None:
        self._settings, self._ends, self._spool = settings, ends, spool
        self.form = Form(layers, int(ends.config.hidden_size))

    def examine_all(self) -> None:
        """Look at every server. Those that are away are looked at when they are back; one must be there.

        Raises TargetError, with the command that starts a server as it must be.
        """
        asyncio.run(self._examine_all())

    async def examine(self, servers: Servers, server: Server) -> None:
        """Raises TargetError for a server that hands out something else, ServerError for one that is away."""
        try:
            self.form = await self._look(servers, server)
        except ServerError as error:
            if error.retryable:
                raise
            raise TargetError(
                f"{server.url} of capture.servers cannot be captured from: {error}.\nStart it as\n\n"
                f"{serve_command(self._settings, self.form.layers)}\n"
            ) from None
        server.is_known = True
        log.info(event("capture server found", server=server.url, model=self.form.model, dtype=self.form.dtype))

    async def _examine_all(self) -> None:
        servers = Servers(self._settings.capture)
        began, said = time.monotonic(), 0.0
        try:
            while True:
                away: list[ServerError] = []
                for server in servers.all:
                    try:
                        await self.examine(servers, server)
                    except ServerError as error:
                        away.append(error)
                if len(away) < len(servers.all):
                    break
                if time.monotonic() - began > self._settings.capture.ready_timeout_s:
                    raise TargetError(
                        f"no server of capture.servers answers: {'; '.join(map(str, away))}. Start one as\n\n"
                        f"{serve_command(self._settings, self.form.layers)}\n"
                    )
                if not said or time.monotonic() - said > SAY_EVERY_S:
                    said = time.monotonic()
                    log.warning(event("waiting for capture servers", error=away[0]))
                await asyncio.sleep(AGAIN_S)
            for error in away:
                log.warning(event("capture server is away", error=error))
        finally:
            await servers.close()

    async def _look(self, servers: Servers, server: Server) -> Form:
        models = await servers.models(server)
        model = _chosen(models, self._settings)
        longest, most = longest_row(self._settings), model.get("max_model_len")
        if isinstance(most, int) and most <= longest:
            raise Mismatch(
                f"it takes {most} tokens, the one that it answers with included, and rows have up to {longest} "
                "(trainer.max_length, trainer.batch_tokens)"
            )
        form = Form(self.form.layers, self.form.width, self.form.dtype, str(model["id"]))
        ids = torch.arange(PROBE_TOKENS) * 7919 % min(len(self._ends.embedding), 50_000)
        first, token = await self._probe(servers, server, ids, form)
        second, _ = await self._probe(servers, server, ids, form)
        self._check_twice(first, second)
        self._check_token(first[-1, -1], token)
        return Form(form.layers, form.width, first.dtype, form.model)

    async def _probe(self, servers: Servers, server: Server, ids: Tensor, form: Form) -> tuple[Tensor, int | None]:
        """States (T, n, D), and the token that comes after them."""
        file, token = await states_of(
            servers, server, self._spool, ids=ids, form=form, request=self._spool.new_request()
        )
        try:
            return states.read(file).clone(), token
        finally:
            self._spool.remove(file)

    def _check_twice(self, first: Tensor, second: Tensor) -> None:
        difference = float((first.float() - second.float()).abs().max() / first.float().abs().max())
        if not difference <= (1e-4 if first.dtype == torch.float32 else 5e-2):
            raise Mismatch(
                f"the same {PROBE_TOKENS} tokens have other states the second time, by {difference:.2g} of the "
                "largest: is the prefix cache on?"
            )

    def _check_token(self, last: Tensor, token: int | None) -> None:
        """The last state must give, by the final norm and the head of target.path, the token that the server chose."""
        if token is None:  # a server that does not tell ids
            return
        logits = self._ends.logits(last.to(self._ends.embedding))
        top = float(logits.max())
        if not 0 <= token < len(logits) or top - float(logits[token]) > 0.05 * (top - float(logits.mean())):
            raise Mismatch(
                f"it goes on with token {token}, and its last state gives {int(logits.argmax())} by the final norm and "
                f"the head of target.path = {self._settings.target.path}: it serves other weights, or the last of its "
                f"layers is not {self.form.layers[-1]}"
            )


def _chosen(models: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """The served model that is the target: by its name, or by the folder that it was loaded from."""
    for model in models:
        if model.get("id") == settings.model or model.get("root") == settings.target.path:
            return model
    names = ", ".join(str(model.get("id")) for model in models) or "nothing"
    raise Mismatch(f"it serves {names}, and the target is {settings.model} (target.model, target.path)")
