"""What a worker shows Prometheus: the state of its node, read at each scrape, and its tally."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

import draftfleet
from draftfleet.live import ServerState, WorkerState
from draftfleet.metrics import gauge
from workers.node import Node
from workers.servers import Server

GAUGES = {
    "running": ("server_requests_running", "Requests that the server says it is at work on, from anybody."),
    "waiting": ("server_requests_waiting", "Requests that the server says wait in its own queue."),
    "kv": ("server_kv_used_ratio", "Share of the server's KV cache that is in use."),
}
"""From a field of a server's gauges to the metric and its help."""

COUNTERS = {
    "preemptions": ("server_preemptions", "Sequences that the server put back for want of room."),
    "generated_tokens": ("server_generated_tokens", "Tokens that the server says it has generated, for anybody."),
}


class NodeCollector(Collector):
    """Reads only what is in memory: a scrape waits for no server, no Redis and no storage."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        servers = list(self._node.servers.all.values())
        for server in servers:
            self._node.tally.know(server.url)
        yield from self._process()
        yield from self._work()
        yield from _servers(servers)
        yield from _their_own(servers)
        yield from self._node.tally.collect()

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry would otherwise collect once to learn the names."""
        return iter(())

    def _process(self) -> Iterator[Metric]:
        node = self._node
        info = node.host, node.model, draftfleet.__version__
        yield gauge("draftfleet_worker_info", "1, with what this worker is.", {info: 1}, ("host", "model", "version"))
        states = {(state,): float(node.state == state) for state in get_args(WorkerState)}
        yield gauge("draftfleet_worker_state", "1 for the state that the worker is in.", states, ("state",))
        blocked = {(): float(node.guard.is_blocked)}
        yield gauge("draftfleet_storage_paused", "1 while the storage cannot be used and the worker waits.", blocked)

    def _work(self) -> Iterator[Metric]:
        node = self._node
        runs = {(report.run, report.run_id): 1.0 for report in node.holdings.reports()}
        yield gauge("draftfleet_run_info", "1 for each run that batches are held of.", runs, ("run", "run_id"))
        yield gauge("draftfleet_batches_held", "Batches at work here.", {(): len(node.holdings.all())})
        yield gauge("draftfleet_rows_waiting", "Rows that wait for a slot.", {(): node.pool.num_waiting})
        yield gauge("draftfleet_rows_in_flight", "Rows that a server is at work on.", {(): node.pool.num_in_flight})


def _servers(servers: list[Server]) -> Iterator[Metric]:
    """How this worker sees its servers."""
    states = {(one.url, state): float(one.state == state) for one in servers for state in get_args(ServerState)}
    yield gauge("draftfleet_server_state", "1 for the state that a server is in.", states, ("server", "state"))
    fields: dict[str, tuple[str, dict[tuple[str, ...], float]]] = {
        "rows_in_flight": ("Requests it holds of ours.", {(one.url,): one.in_flight for one in servers}),
        "limit": ("Most requests it gets at once.", {(one.url,): one.limit for one in servers}),
        "seconds_per_token": (
            "Time per token of its answers, averaged over the latest.",
            {(one.url,): one.seconds_per_token for one in servers if one.seconds_per_token is not None},
        ),
    }
    for name, (help_, values) in fields.items():
        yield gauge(f"draftfleet_server_{name}", help_, values, ("server",))


def _their_own(servers: list[Server]) -> Iterator[Metric]:
    """What servers say of themselves, where they have gauges."""
    for field, (name, help_) in GAUGES.items():
        yield gauge(f"draftfleet_{name}", help_, _told(servers, field), ("server",))
    for field, (name, help_) in COUNTERS.items():
        family = CounterMetricFamily(f"draftfleet_{name}", help_, labels=("server",))
        for key, value in _told(servers, field).items():
            family.add_metric(key, value)
        yield family


def _told(servers: list[Server], field: str) -> dict[tuple[str, ...], float]:
    values: dict[tuple[str, ...], Any] = {(one.url,): getattr(one.gauges, field, None) for one in servers}
    return {key: float(value) for key, value in values.items() if value is not None}
