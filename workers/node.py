"""This process as a whole: it owns the node's servers, holds batches, pauses, drains, and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass

import redis
from celery import Celery

from draftfleet import tokens
from draftfleet.addresses import Address, expand
from draftfleet.claims import Claims
from draftfleet.errors import CorruptFile, DraftfleetError, RunBusy, RunError, RunMissing, ServerError, StorageError
from draftfleet.live import WorkerState
from draftfleet.logs import event
from draftfleet.redaction import redact
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.settings.sections import TASKS_END_S
from draftfleet.storage import Storage
from draftfleet.tokens import TargetTokenizer
from draftfleet.wire import BatchMessage
from workers.batch import Batch, Content
from workers.clearance import Clearance
from workers.client import Client
from workers.control import Orders
from workers.generate import Generator
from workers.guard import Guard
from workers.history import Recorder
from workers.holdings import Holdings
from workers.loop import Loop
from workers.node_lock import NodeLock
from workers.partials import Partials
from workers.pool import Pool
from workers.servers import Server, Servers
from workers.suspects import Suspects
from workers.tally import Tally

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run as this process works on it."""

    run: Run
    content: Content
    claims: Claims
    partials: Partials


class Node:
    """Made on the main thread, after the node lock was taken. `error` is what stopped it, if anything did."""

    def __init__(
        self,
        settings: Settings,
        app: Celery,
        client: redis.Redis,
        storage: Storage,
        *,
        lock: NodeLock,
        tokenizer: TargetTokenizer | None,
    ) -> None:
        self.settings = settings
        self.storage = storage
        self.redis = client
        self.app = app
        self.host = socket.gethostname()
        self.process = f"{self.host}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.started_at = time.time()
        self.error: DraftfleetError | None = None
        self.draining = threading.Event()
        self.drained = threading.Event()
        self.history = Recorder(self.process)
        self.loop = Loop()
        self.guard = Guard(self._storage_changed)
        self.tally = Tally()
        self.holdings = Holdings(self.guard, on_lost=lambda batch: batch.stop("lost"), tally=self.tally)
        self.suspects = Suspects(self.draining)
        self.orders = Orders(
            client,
            self.process,
            self.holdings,
            let_go=lambda batches, patience_s: self.loop.run(self.pool.retire(batches, patience_s)),
            drain=lambda: self.drain(settings.worker.drain_s),
            on_change=lambda: self.loop.call(self.pool.fill),
            patience_s=settings.worker.drain_s,
        )
        self._lock = lock
        self._runs: dict[tuple[str, str], OpenRun] = {}
        self._runs_lock = threading.Lock()
        self._left: list[str] = []
        self.loop.start()
        self.loop.run(self._build(tokenizer))

    async def _build(self, tokenizer: TargetTokenizer | None) -> None:
        """What lives in the event loop."""
        knobs, target = self.settings.worker, self.settings.target
        context = target.context_tokens or (tokens.context_tokens(target.path) if target.path else None)
        self._hurry = asyncio.Event()
        self.client = Client(knobs)
        self.servers = Servers(self.client, knobs, self.settings.model)
        self.clearance = Clearance(
            self.client,
            self.servers,
            tokenizer,
            self.fail,
            request_timeout_s=knobs.request_timeout_s,
            context_tokens=context,
        )
        self.generator = Generator(self.client, tokenizer, context_tokens=context, worker=self.process)
        self.pool = Pool(
            self.servers,
            self.generator.ask,
            self.generator.refuse,
            self.clearance.start,
            self.fail,
            max_tries=knobs.max_tries,
            tally=self.tally,
        )
        self.pool.rank_of = self.orders.rank
        self.servers.on_change = self.clearance.on_change = self.pool.fill
        self.servers.recall = self._recall
        self.servers.set(expand(knobs.servers), knobs)

    @property
    def model(self) -> str:
        """The one model that its servers serve."""
        return self.servers.model

    @property
    def state(self) -> WorkerState:
        if self.draining.is_set():
            return "draining"
        if self.guard.is_blocked:
            return "paused"
        return "working" if self.servers.ready else "waiting"

    def wants_batch(self, num_received: int) -> bool:
        """Whether another batch should be taken. `num_received` are those taken whose tasks have not ended.

        A batch that was received and is not yet in the pool counts as rows that wait, all of them. Rows that free slots
        are about to take count as in flight.
        """
        if (
            self.state != "working"
            or self.suspects.is_cornering
            or num_received >= self.settings.worker.max_batches_held
        ):
            return False
        held = self.holdings.all()
        batch_rows = max((len(batch.prompts) for batch in held), default=0) or self.settings.producer.batch_size
        num_counted = sum(batch.is_submitted for batch in held) + self.holdings.num_settling
        num_coming = max(0, num_received - num_counted - self.suspects.num_waiting)
        num_waiting = self.pool.num_waiting + num_coming * batch_rows - self.servers.num_free
        return num_waiting < self.settings.worker.watermark_batches * batch_rows

    def wait_ready(self) -> None:
        """Until a server is ready or the node drains. Raises NotReady or Mismatch."""
        waiting = asyncio.run_coroutine_threadsafe(
            self.servers.wait_ready(self.settings.worker.ready_timeout_s), self.loop.asyncio
        )
        while not waiting.done() and not self.draining.wait(0.1):
            pass
        if waiting.done():
            waiting.result()
        waiting.cancel()

    def find(self, message: BatchMessage) -> OpenRun | None:
        """The run of a message; None, with a word in the log, if it is not one that this worker may work on."""
        key = message.run, message.run_id
        with self._runs_lock:
            if key in self._runs:
                self.history.see(self._runs[key].run)
                return self._runs[key]
            try:
                run = self.guard.run("opening a run", lambda: Run.open(self.storage, message.run))
            except (RunMissing, CorruptFile) as error:
                return self._dropped(message, str(error))
            if run.run_id != message.run_id:
                return self._dropped(message, f"the run of that name in {self.storage.url} has id {run.run_id}")
            try:
                content = Content.of(run)
                self.guard.run("reading control.json", lambda: self.orders.open(run))
            except (RunError, CorruptFile) as error:
                return self._dropped(message, str(error))
            if content.model != self.model:
                return self._dropped(message, f"it asks for {content.model}, and the servers serve {self.model}")
            claims = Claims(self.redis, run.run_id, self.settings.claims, self.process)
            self._runs[key] = OpenRun(run, content, claims, Partials(run, self.process))
            self.history.see(run)
            log.info(event("run opened", run=run.name, run_id=run.run_id, model=content.model))
            return self._runs[key]

    def submit(self, batch: Batch) -> None:
        """Put what is left of a batch into the pool."""
        rows = self.generator.rows(batch)

        async def submit() -> None:
            self.pool.submit(batch, rows)

        self.loop.run(submit())
        batch.is_submitted = True
        if self.draining.is_set():
            batch.stop("draining")

    def withdraw(self, batch: Batch) -> None:
        """Take the rows of a stopped batch out of the pool, and save those that are finished."""
        self.loop.run(self.pool.drop(batch))
        try:
            self.holdings.checkpoint()
        except (StorageError, OSError) as error:
            rows = len(batch.unsaved())
            log.error(event("finished rows not saved", batch=batch.name, rows=rows, error=str(error)))

    def fail(self, error: DraftfleetError) -> None:
        """No row can succeed: give everything back and end with this error. From any thread."""
        if self.error is None:
            self.error = error
            log.error(event("worker stops", error=error.summary if isinstance(error, ServerError) else str(error)))
        self.drain(patience_s=0)

    def drain(self, patience_s: float) -> None:
        """Consume and start nothing more; give the rest back after `patience_s`. Asked again, it hurries."""
        if self.draining.is_set():
            self.loop.call(self._hurry.set)
            return
        self.draining.set()
        threading.Thread(target=self._drain, args=[patience_s], name="drain", daemon=True).start()

    def reload(self, settings: Settings) -> None:
        """Take over the server list and limits of new settings; what is running goes on."""
        ours: list[Address] = []
        for address in expand(settings.worker.servers):
            try:
                self._lock.take(address.url)
            except RunBusy as error:
                log.error(event("server not added", server=address.url, error=str(error)))
            else:
                ours.append(address)
        self._lock.keep([address.url for address in ours])
        self.loop.call(self.servers.set, ours, settings.worker)
        log.info(event("settings reloaded", servers=len(ours), concurrency=settings.worker.concurrency or "adaptive"))

    def close(self) -> None:
        self.loop.run(self.client.close())
        self.loop.stop()
        self.history.close()

    def _drain(self, patience_s: float) -> None:
        begun = time.monotonic()
        log.info(
            event(
                "worker draining",
                batches=len(self.holdings.all()),
                rows_in_flight=self.pool.num_in_flight,
                patience_s=patience_s,
            )
        )
        self.guard.give_up()
        try:
            self.loop.call(self.clearance.cancel)
            self.loop.run(self.pool.drain(patience_s, self._hurry))
            self.holdings.checkpoint()
        except (StorageError, OSError) as error:
            log.error(event("finished rows not saved", error=str(error)))
        finally:
            for batch in self.holdings.all():
                batch.stop("draining")
            left = self.holdings.wait_until_free(TASKS_END_S)
            self.holdings.close()
            log.info(event("worker drained", batches_left=left, seconds=time.monotonic() - begun))
            self.history.end()
            self.drained.set()

    async def _recall(self, server: Server, most: int | None) -> int:
        if most is None:
            self.clearance.recall(server)
        return await self.pool.recall(server, most)

    def _storage_changed(self) -> None:
        """Asked in the loop whether it is blocked: of two threads that tell at once, the slower one knows less."""
        self.loop.call(lambda: self.pool.pause(self.guard.is_blocked))

    def left_to_newer(self, reason: str) -> None:
        """Say so, once for each version."""
        if reason not in self._left:
            self._left.append(reason)
            log.warning(event("messages left to newer workers", reason=reason))

    @property
    def newer(self) -> str:
        """What this worker cannot do since it is too old; the latest."""
        return redact(self._left[-1]) if self._left else ""

    def _dropped(self, message: BatchMessage, reason: str) -> None:
        self.tally.dropped()
        log.warning(event("message dropped", run=message.run, batch=message.batch, reason=reason))
