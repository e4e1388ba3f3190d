"""The page that Prometheus reads: one small HTTP server per process, made with prometheus-client.

Metrics never hold a name of a batch, a row key or a text: every label has few values (docs/metrics.md).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftfleet.logs import event

log = logging.getLogger(__name__)

AGAIN_S = 30.0
"""Seconds between two tries at a port that is taken: the process before us may still be draining."""


@contextmanager
def served(address: str, port: int | None, *collectors: Collector) -> Generator[None]:
    """Serve what these collect, and what the process uses of the machine. Nothing is served where `port` is None.

    A port that cannot be had is said once and tried again and again: nobody stops working for it.
    """
    if port is None:
        yield
        return
    disable_created_metrics()  # a second series for each counter and histogram, which nobody asks for
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    leaving = threading.Event()
    thread = threading.Thread(target=_serve, args=(address, port, registry, leaving), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join(5)


def _serve(address: str, port: int, registry: CollectorRegistry, leaving: threading.Event) -> None:
    has_said = False
    while True:
        try:
            server, _ = start_http_server(port, address, registry)
            break
        except OSError as error:
            if not has_said:
                log.warning(event("metrics not served", address=address, port=port, error=error, again_s=AGAIN_S))
            has_said = True
            if leaving.wait(AGAIN_S):
                return
    log.info(event("metrics served", url=f"http://{address}:{server.server_port}/metrics"))
    leaving.wait()
    server.shutdown()
    server.server_close()


def gauge(name: str, help_: str, values: Mapping[tuple[str, ...], float], labels: Iterable[str] = ()) -> Metric:
    """One family: a value for each tuple of label values, `{(): 3}` where there are no labels."""
    family = GaugeMetricFamily(name, help_, labels=list(labels))
    for key, value in values.items():
        family.add_metric(key, value)
    return family
