"""Shards that cannot be read are moved aside; their batches, and whatever else is missing, go to the queue again."""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftfleet.errors import CorruptFile
from draftfleet.queue import connect, make_app, publish
from draftfleet.reconcile import Reconciler, model_of
from draftfleet.runs import Run
from draftfleet.settings import Settings


def move_aside(run: Run) -> list[str]:
    """Move shards that cannot be read aside, so that their batches are done again. Returns their batches.

    Reads every shard whole, since a footer can be sound where a page is not.
    """
    corrupt: list[str] = []
    for batch in run.done():
        try:
            run.read_samples(batch)
        except CorruptFile:
            corrupt.append(batch)
        except FileNotFoundError:  # another moved it
            continue
    return set_aside(run, corrupt)


def set_aside(run: Run, corrupt: Sequence[str]) -> list[str]:
    """Move these shards aside. Returns the batches of those that were still there."""
    moved: list[str] = []
    for batch in corrupt:
        try:
            run.set_aside(batch)
        except FileNotFoundError:  # another did
            continue
        moved.append(batch)
    if moved and (sealed := run.sealed()) is not None:
        run.seal(sealed | {"repaired_at": time.time()})  # reconcilers that took the run for finished look again
    return moved


def publish_again(settings: Settings, run: Run, moved: Sequence[str]) -> int:
    """Returns how many batches. Raises QueueError: then the workers' own look at the storage does it, later."""
    app, client = make_app(settings), connect(settings)
    published = publish(app, client, run, model_of(run), moved, retry=True)
    return published + Reconciler(app, client, run.storage, settings.claims).republish()
