"""`draftfleet up` tells what changes, once."""

from __future__ import annotations

from typing import Any

from draftfleet.live import ServerReport, WorkerReport
from draftfleet.news import News


def report(state: Any, server: Any, reason: str = "") -> WorkerReport:
    fields = {"in_flight": 0, "limit": 8, "slots": 8, "rows": 0, "tokens": 0, "tokens_per_s": 0.0}
    servers = [ServerReport(url="http://127.0.0.1:8000", state=server, reason=reason, **fields)]
    return WorkerReport(process="node-1-ab", host="node", pid=1, started_at=0.0, state=state, servers=servers)


def test_each_change_is_told_once_with_its_reason() -> None:
    news = News()

    assert news.of([report("waiting", "waiting", "connection refused")]) == [
        "worker on node is waiting",
        "server http://127.0.0.1:8000 is waiting: connection refused",
    ]
    assert news.of([report("waiting", "waiting", "connection refused")]) == []
    assert news.of([report("working", "ready")]) == [
        "worker on node is working",
        "server http://127.0.0.1:8000 is ready",
    ]


def test_a_report_that_is_missing_for_a_moment_is_no_news() -> None:
    news = News()
    news.of([report("working", "ready")])

    assert news.of([]) == []
    assert news.of([report("working", "ready")]) == []
