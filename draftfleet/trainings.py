"""Where the trainings of a run stand: told by their progress, their claims, and when they were last asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import redis

from draftfleet import settings
from draftfleet.claims import Claims, published_key
from draftfleet.queue import ENDED, TRAIN_FIELD
from draftfleet.reconcile import TRAIN_CLAIM
from draftfleet.runs import Run

State = Literal["asked for", "queued", "begins", "training", "waits for samples", "finished", "failed"]
"""queued: its message waits for a trainer that is free. begins: a trainer has it, and has made no step yet. failed: it
ended early, and is not asked for again by itself. asked for: Redis has forgotten it, or does not answer."""


def by_progress(progress: Mapping[str, Any]) -> State:
    """What progress.json alone says."""
    if progress["finished"]:
        return "finished"
    if progress.get("waiting"):
        return "waits for samples"
    return "training" if progress["step"] else "asked for"


def standing(
    client: redis.Redis, run: Run, knobs: settings.Claims, drafters: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[State, str | None]]:
    """The state of each drafter, by its progress, and the trainer process that has it. May raise redis.RedisError."""
    if not drafters:
        return {}
    owners = {
        name.removeprefix(TRAIN_CLAIM): owner
        for owner, names in Claims(client, run.run_id, knobs, "onlooker").holders().items()
        for name in names
        if name.startswith(TRAIN_CLAIM)
    }
    stamps = client.hmget(published_key(run.run_id), [TRAIN_FIELD + name for name in drafters])
    return {
        name: (_state(progress, owners.get(name), stamp), owners.get(name))
        for (name, progress), stamp in zip(drafters.items(), stamps, strict=True)
    }


def _state(progress: Mapping[str, Any], owner: str | None, stamp: Any) -> State:
    told = by_progress(progress)
    if told == "finished":
        return told
    if owner is not None:
        return "begins" if told == "asked for" else told
    if stamp is None:
        return "asked for"
    return "failed" if int(stamp) == ENDED else "queued"
