"""What a person orders of a run from afar: pause, resume, cancel, another priority, another token budget.

An order is written to the storage (draftfleet.control) and holds from then on, whatever is running: workers look every
two seconds. Messages that are queued under an older state are found out by whoever takes them.
"""

from __future__ import annotations

import sys
from typing import Any

import redis

from draftfleet import control
from draftfleet.accounting import Accountant
from draftfleet.budget import reached
from draftfleet.claims import Claims, published_key
from draftfleet.control import PRIORITIES, Control
from draftfleet.errors import QueueError, RunError, SettingsError
from draftfleet.queue import TRAIN_FIELD, chunks, connect, forget_published, make_app, publish
from draftfleet.reconcile import model_of
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage


def pause(settings: Settings, *, reason: str) -> str:
    """Have no more rows of the run started; those in flight may finish within the workers' `drain_s`."""
    run = _run(settings)
    _change(settings, run, state="paused", reason=reason)
    return f"run {run.name} is paused; `draftfleet resume {run.name}` goes on with it"


def cancel(settings: Settings, *, reason: str) -> str:
    """End the run: its requests are broken off, and a trainer takes what there is for all. Nothing is deleted."""
    run = _run(settings)
    _change(settings, run, state="cancelled", reason=reason)
    return f"run {run.name} is cancelled; its samples stay, and `draftfleet resume {run.name}` would go on with it"


def resume(settings: Settings) -> str:
    """Go on with a run that was paused or cancelled. Publishes what is outstanding at once.

    Raises RunError if its token budget is spent, QueueError if Redis is away: then the reconciler publishes.
    """
    run = _run(settings)
    _refuse_if_spent(run, control.read(run))
    client = _connect(settings)
    if client is not None:  # whoever dies from here on leaves batches that count as never published
        _forget_batches(client, run)
    controlled = _change(settings, run, state="running", reason="")
    return f"run {run.name} is running; {_publish(settings, run, controlled)}"


def set_priority(settings: Settings, *, priority: str) -> str:
    """Put the run before others or behind them. Raised, what is outstanding is published anew, under that priority.

    Lowered, its messages are put back by the workers that take them. Raises SettingsError.
    """
    if priority not in PRIORITIES:
        raise SettingsError(f"priority {priority}: it is one of {', '.join(PRIORITIES)}.")
    run = _run(settings)
    before = control.read(run)
    now = _change(settings, run, priority=priority)
    said = f"run {run.name} has priority {priority}"
    return f"{said}; {_publish(settings, run, now)}" if now.rank < before.rank else said


def set_budget(settings: Settings, *, tokens: int | None) -> str:
    """Change the token budget; None takes it away. A run that was paused for its budget is not resumed by that."""
    run = _run(settings)
    now = _change(settings, run, token_budget=tokens)
    said = f"run {run.name} has " + (f"a budget of {tokens:,} tokens" if tokens else "no token budget")
    return said if now.is_running else f"{said}; it is {now.state}: `draftfleet resume {run.name}` goes on with it"


def begin(settings: Settings, run: Run, client: redis.Redis) -> None:
    """What the producer's own settings say of priority and budget, where they say anything."""
    knobs = settings.producer
    values: dict[str, Any] = {"priority": knobs.priority, "token_budget": knobs.token_budget}
    if given := {name: value for name, value in values.items() if value is not None}:
        control.change(run, client, **given)


def _run(settings: Settings) -> Run:
    return Run.open(open_storage(settings.storage), settings.run)


def _connect(settings: Settings) -> redis.Redis | None:
    """None, with a word on standard error, if Redis is away: the storage alone decides."""
    try:
        return connect(settings)
    except QueueError as error:
        print(f"{error} The order holds all the same: it lies in the storage.", file=sys.stderr)
        return None


def _change(settings: Settings, run: Run, **values: Any) -> Control:
    try:
        return control.change(run, _connect(settings), **values)
    except redis.RedisError:  # it went away just now
        return control.change(run, None, **values)


def _refuse_if_spent(run: Run, controlled: Control) -> None:
    budget = controlled.token_budget
    if budget is None or controlled.is_running:
        return
    tokens = Accountant(run).account().tokens
    if tokens >= budget or controlled.reason.startswith(reached(budget)):
        raise RunError(
            f"run {run.name} is paused for its budget of {budget:,} tokens and would be paused again at once. "
            f"Raise it with `draftfleet runs budget {run.name} N`, or take it away with N = none."
        )


def _forget_batches(client: redis.Redis, run: Run) -> None:
    names = map(str, client.hkeys(published_key(run.run_id)))
    for fields in chunks(name for name in names if not name.startswith(TRAIN_FIELD)):
        forget_published(client, run.run_id, fields)


def _publish(settings: Settings, run: Run, controlled: Control) -> str:
    client = _connect(settings)
    if client is None:
        return f"a worker publishes what is outstanding within {settings.claims.reconcile_s:g} s of Redis' return"
    held = Claims(client, run.run_id, settings.claims, "orders").held()
    waiting = [batch for batch in run.outstanding() if batch not in held]
    with make_app(settings) as app:
        published = publish(app, client, run, model_of(run), waiting, controlled=controlled)
    return f"{published:,} batches were published"
