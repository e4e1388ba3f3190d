"""What the worker shows of itself: a report in Redis for `draftfleet status`, and the progress of tasks in Flower."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

import draftfleet
from draftfleet import live
from draftfleet.errors import DraftfleetError, ServerError
from draftfleet.live import GaugesReport, RunReport, ServerReport, WorkerReport
from draftfleet.queue import GENERATE
from draftfleet.redaction import redact
from workers.batch import Batch
from workers.filling import Filling
from workers.node import Node
from workers.servers import Server

FLOWER_S = 3.0
"""Seconds between two progress events of one task: Flower keeps each of them in memory."""

RATE_WINDOW_S = 20.0


class Reporter:
    """Its two methods are chores: each may wait for Redis without holding up any work."""

    def __init__(self, node: Node, hostname: str) -> None:
        self._node = node
        self._hostname = hostname
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        self._filling = Filling()

    def report(self) -> None:
        node = self._node
        held = node.holdings.all()
        self._filling.look(time.monotonic(), node.servers.ready if held else ())
        live.publish(
            node.redis,
            WorkerReport(
                process=node.process,
                host=node.host,
                pid=os.getpid(),
                started_at=node.started_at,
                state=node.state,
                reason=reason_of(node.error) or redact(node.guard.reason) or node.newer,
                model=node.model,
                version=draftfleet.__version__,
                servers=[self._server(server) for server in node.servers.present],
                batches_held=len(held),
                rows_waiting=node.pool.num_waiting,
                rows_in_flight=node.pool.num_in_flight,
                wasted=node.tally.wasted_tokens(),
                runs=self._runs(),
            ),
        )

    def _runs(self) -> list[RunReport]:
        lengths = self._node.pool.lengths()
        return [
            run.model_copy(update={"lengths": lengths.get(run.run_id, [])}) for run in self._node.holdings.reports()
        ]

    def progress(self) -> bool:
        """One `task-progress` event per batch at work: its text is in Flower's column Result. False if none is."""
        batches = [batch for batch in self._node.holdings.all() if batch.is_submitted and not batch.is_complete]
        if not batches:
            return False
        in_flight = in_flight_text(self._node.servers.ready)
        with self._node.app.events.default_dispatcher(hostname=self._hostname) as dispatcher:
            for batch in batches:
                dispatcher.send(
                    "task-progress",
                    uuid=batch.task_id,
                    name=GENERATE,
                    args=f"{batch.run.name} {batch.name}",
                    result=f"{progress_text(batch)}, {in_flight}",
                )
        return True

    def _server(self, server: Server) -> ServerReport:
        return ServerReport(
            url=server.url,
            state=server.state,
            reason=redact(server.reason),
            in_flight=server.in_flight,
            limit=server.limit,
            pinned=server.concurrency.pinned is not None,
            because=server.concurrency.because,
            gauges=_gauges(server),
            rows=server.rows,
            tokens=server.tokens,
            tokens_per_s=self._rate(server),
            slot_s=round(self._filling.slot_s.get(server.url, 0.0), 1),
            busy_s=round(self._filling.busy_s.get(server.url, 0.0), 1),
            silent_s=round(server.watch.silent_s(time.monotonic()), 1),
            speed=server.concurrency.speed,
        )

    def _rate(self, server: Server) -> float:
        """Tokens per second over the last reports. Answers come in whole, so a shorter look would jump."""
        now = time.monotonic()
        seen = self._seen.setdefault(server.url, deque())
        seen.append((now, server.tokens))
        while len(seen) > 2 and now - seen[0][0] > RATE_WINDOW_S:
            seen.popleft()
        (first_at, first), (last_at, last) = seen[0], seen[-1]
        return max(0.0, (last - first) / (last_at - first_at)) if last_at > first_at else 0.0


def state_text(node: Node) -> str:
    """`working, 3 batches held, 101 of 107 in flight`."""
    reason = reason_of(node.error) or redact(node.guard.reason)
    held = f"{len(node.holdings.all())} batches held, {in_flight_text(node.servers.ready)}"
    return f"{node.state}, {held}" + (f": {reason}" if reason else "")


def in_flight_text(servers: Sequence[Server]) -> str:
    """`101 of 107 in flight`: on all ready servers, of their limits."""
    return f"{sum(one.in_flight for one in servers)} of {sum(one.limit for one in servers)} in flight"


def _gauges(server: Server) -> GaugesReport | None:
    if (seen := server.gauges) is None:
        return None
    return GaugesReport(
        running=seen.running,
        waiting=seen.waiting,
        kv=seen.kv,
        preemptions=seen.preemptions,
        generated_tokens=seen.generated_tokens,
    )


def reason_of(error: DraftfleetError | None) -> str:
    """Without the body of a server's answer: it may quote a prompt."""
    return "" if error is None else redact(error.summary if isinstance(error, ServerError) else str(error))


def progress_text(batch: Batch) -> str:
    """`37/64 prompts, 2.1k tok/s`."""
    seconds = max(time.monotonic() - batch.taken_at, 1e-3)
    rate = batch.counts().tokens / seconds
    shown = f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"
    return f"{len(batch.finished)}/{len(batch.prompts)} prompts, {shown} tok/s"
