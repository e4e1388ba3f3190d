"""After shards were moved aside: their batches, and whatever else is missing, go to the queue again."""

from __future__ import annotations

from collections.abc import Sequence

from draftfleet.queue import connect, make_app, publish
from draftfleet.reconcile import Reconciler, model_of
from draftfleet.runs import Run
from draftfleet.settings import Settings


def publish_again(settings: Settings, run: Run, moved: Sequence[str]) -> int:
    """Returns how many batches. Raises QueueError: then the workers' own look at the storage does it, later."""
    app, client = make_app(settings), connect(settings)
    published = publish(app, client, run, model_of(run), moved, retry=True)
    return published + Reconciler(app, client, run.storage, settings.claims).republish()
