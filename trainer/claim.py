"""The right to train one drafter: renewed by the process that supervises, looked at by the one that trains."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import redis

from draftfleet.claims import Claims, Holding
from draftfleet.errors import QueueError
from draftfleet.logs import event
from draftfleet.queue import connect
from draftfleet.reconcile import TRAIN_CLAIM
from draftfleet.runs import Run
from draftfleet.settings import Settings

log = logging.getLogger(__name__)

TOKEN = "TRAINER_CLAIM_TOKEN"
"""Environment variable of the child: the token of its claim, looked at before each checkpoint is put in place."""


class Claim:
    """Held as long as it is renewed."""

    def __init__(self, claims: Claims, name: str, token: str, renew_s: float) -> None:
        self.name = name
        self.token = token
        self.is_lost = False
        self._claims = claims
        self._renew_s = renew_s
        self._due = time.monotonic()

    def renew_if_due(self, saved_steps: int) -> None:
        """Steps that were saved under this claim count as progress: a later lapse is then no attempt."""
        if self.is_lost or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._renew_s
        try:
            answer = self._claims.renew({self.name: Holding(self.token, saved_steps)})[self.name]
        except redis.RedisError as error:  # go on: nobody else can take it either
            log.warning(event("claim not renewed", claim=self.name, error=error))
            return
        if answer == "lost":
            self.is_lost = True
            log.error(event("claim lost", claim=self.name))

    def release(self) -> bool:
        return self._claims.release(self.name, self.token)


def check(settings: Settings, run: Run) -> Callable[[], bool]:
    """Whether this process may still put checkpoints: no other trainer has taken the claim.

    Always, if it was started by hand; and while Redis is away or has forgotten, since then nobody else has been let in.
    """
    token, name = os.environ.get(TOKEN), TRAIN_CLAIM + settings.trainer.drafter

    def may_put() -> bool:
        if token is None:
            return True
        try:
            claims = Claims(connect(settings), run.run_id, settings.claims, owner="trainer")
            return claims.is_ours(name, token) or claims.holder(name) is None
        except (QueueError, redis.RedisError) as error:
            log.warning(event("claim not checked", run=run.name, claim=name, error=error))
            return True

    return may_put
