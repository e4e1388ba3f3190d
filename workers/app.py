"""`draftfleet work`: from the settings to a running worker, and to its end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

import redis
from celery import Celery

from draftfleet import budget, live, tokens
from draftfleet.addresses import expand
from draftfleet.budget import Budgets
from draftfleet.errors import SettingsError
from draftfleet.health import Pulse
from draftfleet.logs import event
from draftfleet.metrics import served
from draftfleet.program import program, wait_for_redis
from draftfleet.queue import make_app, queues
from draftfleet.reconcile import Reconciler
from draftfleet.settings import Settings
from draftfleet.storage import Storage, open_storage, probe
from workers import dialects
from workers.control import LOOK_S
from workers.guard import SPACE_S
from workers.history import FLUSH_S
from workers.intake import end_when_drained, gate
from workers.loop import Chore
from workers.metrics import NodeCollector
from workers.node import Node
from workers.node_lock import NodeLock
from workers.report import FLOWER_S, Reporter, state_text
from workers.signals import Signals
from workers.tasks import register

log = logging.getLogger(__name__)


def work(settings: Settings, reload: Callable[[], Settings] | None = None) -> int:
    """Work until told to stop. Returns the exit code; raises the error that made it stop. `reload` serves SIGHUP.

    Raises SettingsError, RunBusy (another worker has one of the servers), NotReady, Mismatch, Unauthorized.
    """
    settings = _with_servers(settings)
    with NodeLock() as lock, Signals() as told:
        for address in expand(settings.worker.servers):
            lock.take(address.url)
        with Pulse("worker") as pulse:
            return _serve(settings, lock, told, pulse, reload)


def _serve(
    settings: Settings, lock: NodeLock, told: Signals, pulse: Pulse, reload: Callable[[], Settings] | None
) -> int:
    app = make_app(settings)
    storage = open_storage(settings.storage)
    client = wait_for_redis(settings, told.stopping)
    if client is None:
        return 0
    tokenizer = tokens.load(settings.target.path) if settings.target.path else None
    node = Node(settings, app, client, storage, lock=lock, tokenizer=tokenizer)
    pulse.state = lambda: state_text(node)
    told.listen(
        lambda: node.drain(settings.worker.drain_s),
        None if reload is None else lambda: node.reload(_with_servers(reload())),
    )
    if told.stopping.is_set():
        return 0
    try:
        asyncio.run_coroutine_threadsafe(pulse.turns("requests"), node.loop.asyncio)
        code = _work(node, app, storage, pulse)
    finally:
        node.close()
    if node.error is not None:
        raise node.error
    return code


def _work(node: Node, app: Celery, storage: Storage, pulse: Pulse) -> int:
    hostname = f"worker-{os.getpid()}@{node.host}"
    reporter = Reporter(node, hostname)
    knobs = node.settings.worker

    def report() -> None:
        try:
            reporter.report()
        except redis.RedisError:
            pulse.excuse("queue")  # Celery's loop stands still until Redis is back
            raise

    with (
        served(knobs.metrics_address, knobs.metrics_port, NodeCollector(node)),
        _chores(
            Chore("report", live.PUBLISH_S, report, at_once=True, on_turn=pulse.turned),
            Chore("orders", LOOK_S, node.orders.look),
        ),
    ):
        try:
            node.guard.run("probing the storage", lambda: probe(storage))
            node.wait_ready()
            if node.draining.is_set():
                return 0
            with _chores(*_duties(node, reporter, storage, pulse)):
                return _consume(node, app, hostname, pulse)
        finally:
            _withdraw(node)


def _duties(node: Node, reporter: Reporter, storage: Storage, pulse: Pulse) -> list[Chore]:
    """What goes on beside the work, each in a thread of its own: none may hold up another."""
    knobs = node.settings.claims
    reconciler = Reconciler(node.app, node.redis, storage, knobs, [node.model])
    budgets = Budgets(node.redis, node.model)
    least = node.settings.storage.min_free_gb
    return [
        Chore("space", SPACE_S, lambda: node.guard.watch(storage, least), at_once=True),
        Chore("renew", knobs.renew_s, node.holdings.renew, on_turn=lambda name: pulse.turned(name, knobs.renew_s)),
        Chore("checkpoint", node.settings.worker.checkpoint_interval_s, node.holdings.checkpoint),
        Chore("progress", FLOWER_S, reporter.progress),
        Chore("sweep", knobs.sweep_s, lambda: (reconciler.discover(), reconciler.sweep())),
        Chore("budgets", budget.LOOK_S, lambda: budgets.check(reconciler.runs)),
        Chore("reconcile", knobs.reconcile_s, reconciler.republish, at_once=True),
        Chore("history", FLUSH_S, lambda: node.history.flush_to(batch.run for batch in node.holdings.all())),
    ]


def _consume(node: Node, app: Celery, hostname: str, pulse: Pulse) -> int:
    register(app, node)
    cast(dict[str, set[type]], app.steps)["consumer"].add(gate(node))
    num_tasks = node.settings.worker.max_batches_held
    worker = program(app, hostname, queues(node.model), concurrency=num_tasks, on_turn=lambda: pulse.turned("queue"))
    log.info(event("worker started", process=node.process, model=node.model, servers=len(node.servers.all)))
    ended = threading.Event()
    end_when_drained(node, ended)
    try:
        worker.start()
    finally:
        ended.set()
    if node.drained.is_set():
        return 0
    log.error(event("celery ended by itself", exit_code=worker.exitcode))
    node.drain(0)
    node.drained.wait()
    return int(worker.exitcode or 1)


@contextmanager
def _chores(*chores: Chore) -> Generator[None]:
    for chore in chores:
        chore.start()
    try:
        yield
    finally:
        for chore in chores:
            chore.stop()


def _withdraw(node: Node) -> None:
    try:
        live.withdraw(node.redis, node.process)
    except redis.RedisError:
        log.debug(event("report not withdrawn"))  # it goes by itself


def _with_servers(settings: Settings) -> Settings:
    """The same settings, checked."""
    if settings.worker.dialect != "auto":
        dialects.load(settings.worker.dialect)
    if not expand(settings.worker.servers):
        raise SettingsError(
            "worker.servers is empty: name the local inference servers, for example "
            "`draftfleet work --servers http://127.0.0.1:8000,http://127.0.0.1:8001`."
        )
    return settings
