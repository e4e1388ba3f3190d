"""`draftfleet runs delete`: a run goes from Redis and from the storage, and nobody works on it meanwhile or after.

First the tombstone: workers, trainers and reconcilers let go of the run for good. Then what Redis has of it, then its
folder, run.json last: while it is there, the name is taken, and a deletion that was interrupted can be gone on with.
"""

from __future__ import annotations

import time

import redis

from draftfleet import cleanup, control
from draftfleet.claims import Claims
from draftfleet.errors import QueueError, RunBusy
from draftfleet.queue import connect
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import Storage, open_storage

LOOK_S = 0.2
LET_GO_S = 15.0
"""After the tombstone, how long holders that took a batch just before it may take to see it. They look every 2 s."""


def find(settings: Settings) -> Run:
    """The run to delete, also one whose deletion was interrupted. Raises RunMissing."""
    return Run.open(open_storage(settings.storage), settings.run, even_deleted=True)


def delete(settings: Settings) -> str:
    """Delete the run that the settings name. Returns a sentence that says so.

    Raises RunBusy, naming the processes, while any holds work of it; QueueError if Redis is away, since nobody can
    then say who holds what.
    """
    run = find(settings)
    client = connect(settings)
    try:
        free_it = (
            f"`draftfleet cancel {run.name}` makes workers let go of it within seconds, "
            f"`draftfleet pause {run.name}` once the rows in flight are finished; a training ends with its trainer."
        )
        _refuse_if_held(client, run, settings, patience_s=0, what_to_do=free_it)
        control.bury(run)
        go_on = (
            f"They let go of it soon, and nobody takes it any more: `draftfleet runs delete {run.name}` goes on then."
        )
        _refuse_if_held(client, run, settings, patience_s=LET_GO_S, what_to_do=go_on)
        cleanup.remove_keys(client, run.storage)
    except redis.RedisError as error:
        raise QueueError(f"Redis failed: {error}. Nothing was deleted; delete run {run.name} again.") from error
    remove_files(run.storage, run.name)
    return f"run {run.name} was deleted"


def remove_files(storage: Storage, name: str) -> None:
    """All of a run's folder, run.json last."""
    for folder in list(storage.folders(name)):
        storage.delete_folder(f"{name}/{folder}")
    for file in list(storage.list(name)):
        if file != "run.json":
            storage.delete(f"{name}/{file}")
    storage.delete_folder(name)


def _refuse_if_held(client: redis.Redis, run: Run, settings: Settings, *, patience_s: float, what_to_do: str) -> None:
    deadline = time.monotonic() + patience_s
    while holders := Claims(client, run.run_id, settings.claims, "deletion").holders():
        if time.monotonic() >= deadline:
            listing = "\n".join(f"  {owner}: {_shown(names)}" for owner, names in holders.items())
            raise RunBusy(f"run {run.name} is being worked on:\n{listing}\n{what_to_do}")
        time.sleep(LOOK_S)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
