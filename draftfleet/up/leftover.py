"""What processes of this machine left that are no more: their claims need not lapse before the work goes on."""

from __future__ import annotations

import re
import socket

import psutil
import redis

from draftfleet.errors import QueueError
from draftfleet.queue import connect, make_app
from draftfleet.reconcile import Reconciler
from draftfleet.settings import Settings
from draftfleet.storage import open_storage

OWNER = re.compile(r"trainer-(?P<trainer>\d+)@(?P<trains_on>.+)|(?P<works_on>.+)-(?P<worker>\d+)-[0-9a-f]{6}")
"""As trainers and workers name themselves in their claims."""


def give_back(settings: Settings) -> int:
    """Publish their batches and trainings again. Returns how many. May raise StorageError or QueueError.

    For the embedded Redis alone, all of whose clients are on this machine: elsewhere two containers may have the same
    host name, and one does not see the other's processes.
    """
    try:
        reconciler = Reconciler(make_app(settings), connect(settings), open_storage(settings.storage), settings.claims)
        reconciler.discover()
        return reconciler.sweep(has_ended)
    except redis.RedisError as error:
        raise QueueError(f"Redis failed while claims were looked at: {error}.") from error


def has_ended(owner: str) -> bool:
    """Whether the owner of a claim was a process of this machine and is no more."""
    found = OWNER.fullmatch(owner)
    if found is None or (found["trains_on"] or found["works_on"]) != socket.gethostname():
        return False
    try:
        return not any(
            "draftfleet" in word for word in psutil.Process(int(found["trainer"] or found["worker"])).cmdline()
        )
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
