"""What happened in this process since it began, counted: what no state shows afterwards.

Counters and histograms of prometheus-client, which are safe to call from any thread. All calls of one row together take
some 7 microseconds of CPU (benchmarks/client_cpu.py holds the whole path against its bar).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from draftfleet.errors import ServerError, Transient
from draftfleet.records import Outcome, Sample

Cause = Literal["lost claim", "drained", "stalled", "retried", "done twice"]
"""Why tokens were generated for nothing. `retried`: the answer broke off. `done twice`: another was first."""

BatchEnd = Literal["done", "done by another", "given back", "left"]

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600, 1200, 1800, 3600)
"""Upper bounds of the histograms' buckets: from an instant answer to the longest that a request may take."""

OUTCOMES: tuple[Outcome, ...] = ("ok", "truncated", "failed")
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Tally(Collector):
    """Calls are one line where something happens. A `server` is always its URL."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._servers: set[str] = set()
        self._lock = threading.Lock()
        self._rows = self._counter(
            "rows",
            "Rows that ended here, by outcome; of failed ones also the kind of error.",
            "server",
            "outcome",
            "kind",
        )
        self._tokens = self._counter("tokens", "Completion tokens of rows that ended here, and of turns.", "server")
        self._turns = self._counter(
            "turns", "Assistant turns that were answered and after which their conversation went on.", "server"
        )
        self._cut_short = self._counter(
            "conversations_ended", "Conversations that ended before their source did, by why.", "reason"
        )
        self._faults = self._counter(
            "faults",
            "Requests that brought no answer, by kind of fault; most of their rows are asked again.",
            "server",
            "kind",
        )
        self._wasted = self._counter(
            "wasted_tokens",
            "Tokens generated for nothing, by cause: of requests that were cut off, estimated from time and speed.",
            "server", "cause",
        )  # fmt: skip
        self._waited = self._histogram("queue_wait_seconds", "Time that a row waited in this process for a free slot.")
        self._seconds = self._histogram("request_seconds", "Time of a request that was answered.", "server")
        self._taken = self._counter("batches_taken", "Batches that this process took to work on.")
        self._attempts = self._counter(
            "repeated_attempts", "Batches taken after an attempt that ended without release or progress."
        )
        self._ended = self._counter("batches_ended", "Batches that this process let go of, by how.", "end")
        self._lost = self._counter("claims_lost", "Claims that another process had when they were to be renewed.")
        self._retaken = self._counter("claims_retaken", "Claims that Redis had forgotten and that were taken again.")
        self._dropped = self._counter(
            "messages_dropped", "Messages that were no work: unknown, or of a run that is paused or cancelled."
        )
        self._checkpoints = self._counter("checkpoints", "Files of finished rows written to partial/.")
        self._checkpoint_rows = self._counter("checkpoint_rows", "Finished rows in the files written to partial/.")
        self._last_checkpoint = Gauge(
            "draftfleet_last_checkpoint_timestamp_seconds",
            "When finished rows were last written to partial/; 0: not yet.",
            registry=self._registry,
        )
        for end in get_args(BatchEnd):
            self._ended.labels(end)

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()

    def know(self, server: str) -> None:
        """Let its counters stand at 0: a rate cannot see the first step of one that was not there before."""
        with self._lock:
            if server in self._servers:
                return
            self._servers.add(server)
        for outcome in OUTCOMES:
            self._rows.labels(server, outcome, "")
        for cause in CAUSES:
            self._wasted.labels(server, cause)
        self._tokens.labels(server)
        self._turns.labels(server)
        self._seconds.labels(server)

    def answer(self, server: str, sample: Sample, tokens: int, seconds: float) -> None:
        """A row has ended, or a turn of one that goes on. `seconds` is 0 where no answer did it."""
        if sample.outcome == "unfinished":
            self._turns.labels(server).inc()
        else:
            self._rows.labels(server, sample.outcome, sample.error_kind or "").inc()
        if sample.ended:
            self._cut_short.labels(sample.ended.partition(" at turn ")[0]).inc()
        if tokens > 0:
            self._tokens.labels(server).inc(tokens)
        if seconds > 0:
            self._seconds.labels(server).observe(seconds)

    def waited(self, seconds: float) -> None:
        self._waited.observe(seconds)

    def faulted(self, server: str, fault: ServerError, lost_tokens: int) -> None:
        """A request brought no answer. What was generated of one that broke off is wasted."""
        self._faults.labels(server, _fault_name(fault)).inc()
        if isinstance(fault, Transient):
            self.wasted(server, "retried", lost_tokens)

    def wasted(self, server: str, cause: Cause, tokens: int) -> None:
        if tokens > 0:
            self._wasted.labels(server, cause).inc(tokens)

    def wasted_tokens(self) -> dict[str, int]:
        """By cause, over all servers, since the process began."""
        found: dict[str, int] = {}
        for sample in (sample for metric in self._wasted.collect() for sample in metric.samples):
            if sample.name.endswith("_total") and sample.value:
                cause = sample.labels["cause"]
                found[cause] = found.get(cause, 0) + int(sample.value)
        return found

    def taken(self, attempt: int) -> None:
        """A batch was taken; attempts are counted from 1."""
        self._taken.inc()
        self._attempts.inc(attempt > 1)

    def ended(self, end: BatchEnd) -> None:
        self._ended.labels(end).inc()

    def claim(self, renewal: Literal["lost", "retaken"]) -> None:
        (self._lost if renewal == "lost" else self._retaken).inc()

    def dropped(self) -> None:
        self._dropped.inc()

    def checkpoint(self, rows: int) -> None:
        self._checkpoints.inc()
        self._checkpoint_rows.inc(rows)
        self._last_checkpoint.set_to_current_time()

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"draftfleet_{name}", help_, labels, registry=self._registry)

    def _histogram(self, name: str, help_: str, *labels: str) -> Histogram:
        return Histogram(f"draftfleet_{name}", help_, labels, registry=self._registry, buckets=SECONDS)


def _fault_name(fault: ServerError) -> str:
    """`bad_request`, `overload`, `transient`, `mismatch`, `unauthorized`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(fault).__name__).removeprefix("_")
