"""A drafter's training as it is seen from outside: its progress, its claim, and whether anybody is still at work."""

from __future__ import annotations

import time
from typing import Any

import redis

from draftfleet import children, status
from draftfleet.claims import Claims
from draftfleet.errors import TrainingError
from draftfleet.queue import train_queue
from draftfleet.reconcile import TRAIN_CLAIM
from draftfleet.runs import Run
from draftfleet.settings import Settings

ABANDONED_S = 20.0
"""A training that nobody holds and nobody is asked for, for this long, has failed."""


class Training:
    """The drafter's training, seen through its progress and its claim."""

    def __init__(self, settings: Settings, run: Run, client: redis.Redis) -> None:
        self._client = client
        self._claims = Claims(client, run.run_id, settings.claims, "onlooker")
        self._run = run
        self._drafter = settings.trainer.drafter
        self.max_steps = settings.trainer.max_steps
        self._held_at = time.monotonic()

    @property
    def progress(self) -> dict[str, Any]:
        return status.drafters(self._run).get(self._drafter, {})

    @property
    def is_over(self) -> bool:
        """Whether it is finished and its process has ended: one that is stopped before would be asked for again."""
        return bool(self.progress.get("finished")) and not self._is_held

    @property
    def _is_held(self) -> bool:
        return self._claims.holder(TRAIN_CLAIM + self._drafter) is not None

    def check(self) -> None:
        """Raises TrainingError, with the end of its log, once nobody is at work on it."""
        if self._is_held or self._client.llen(train_queue()) or self.is_over:
            self._held_at = time.monotonic()
        elif time.monotonic() - self._held_at > ABANDONED_S:
            log = self._run.drafter_dir(self._drafter) / "train.log"
            raise TrainingError(
                f"the training of {self._drafter} ended early; its log ({log}) says:\n{children.last_lines(log)}"
            )
