"""Control: a run can be paused, cancelled, put before others and given a budget while it is at work.

    RUN/control.json        state, reason, since, priority, token budget; absent: running, normal, no budget
    .deleted/RUN_ID.json    tombstone: the run is being deleted, or was

It lies in the storage: a Redis that forgets everything undoes none of it.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import Any, Literal

import redis
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from draftfleet.errors import CorruptFile, RunMissing
from draftfleet.runs import TOMBSTONES, Run

State = Literal["running", "paused", "cancelled"]
Priority = Literal["high", "normal", "low"]

PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")
"""From the first to the last."""

LOCK_S = 30.0


class Control(BaseModel):
    """control.json. `since` is when the state began, in seconds since the epoch; None: from the first."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: State = "running"
    reason: str = ""
    since: float | None = None
    priority: Priority = "normal"
    token_budget: PositiveInt | None = None

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def rank(self) -> int:
        """0 goes first."""
        return PRIORITIES.index(self.priority)


DELETED = Control(state="cancelled", reason="the run was deleted")


def read(run: Run) -> Control:
    """What holds for a run now; one that has a tombstone is cancelled for good. Raises CorruptFile."""
    if run.storage.exists(tombstone(run.run_id)):
        return DELETED
    try:
        return Control.model_validate_json(run.storage.read(_path(run)))
    except FileNotFoundError:
        return Control()
    except ValidationError as error:
        raise CorruptFile(
            f"{run.storage.url}/{_path(run)} cannot be read: {error.errors()[0]['msg']}. Delete it: the run is then "
            "running with normal priority and without a token budget."
        ) from None


def change(run: Run, client: redis.Redis | None, *, only_if: Control | None = None, **values: Any) -> Control:
    """Change parts of it, one process at a time where there is a Redis. Returns what holds now.

    With `only_if`, nothing is changed unless that held before.

    Raises RunMissing if the run was deleted, StorageError, or redis.RedisError.
    """
    name = f"draftfleet:{run.run_id}:control"
    lock = nullcontext() if client is None else client.lock(name, timeout=LOCK_S, raise_on_release_error=False)
    with lock:
        before = read(run)
        if before == DELETED:
            raise RunMissing(f"run {run.name} was deleted: nothing of it can be changed.")
        if only_if is not None and before != only_if:
            return before
        if values.get("state", before.state) != before.state:
            values["since"] = time.time()
        now = Control.model_validate(before.model_dump() | values)
        if now != before:
            run.storage.put(_path(run), (now.model_dump_json(indent=2) + "\n").encode())
        return now


def bury(run: Run) -> None:
    """Put the tombstone: from now on nobody works on the run, whatever its folder still holds."""
    said = {"run": run.name, "run_id": run.run_id, "deleted_at": time.time()}
    run.storage.put_if_absent(tombstone(run.run_id), (json.dumps(said, indent=2) + "\n").encode())


def tombstone(run_id: str) -> str:
    return f"{TOMBSTONES}/{run_id}.json"


def _path(run: Run) -> str:
    return f"{run.name}/control.json"
