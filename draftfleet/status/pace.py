"""How fast a run gets on: tokens per second, now and on average, and how much of what full servers would make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from draftfleet.accounting import Accountant
from draftfleet.errors import CorruptFile
from draftfleet.index import Entry
from draftfleet.live import WorkerReport

PAUSE_S = 900.0
"""Where no shard was put for longer than this, nobody was at work: it counts for no mean."""


class Begin:
    """When the first rows were asked: the shard that was put first says it. Read once."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def at(self, accountant: Accountant, first: Entry) -> float:
        """Seconds since 1970; when the shard was put, where it does not say when its rows were asked."""
        if first.batch not in self._at:
            try:
                rows = accountant.run.columns(first.batch, ["started_at"])
            except (CorruptFile, FileNotFoundError):
                rows = []
            asked = [row["started_at"] for row in rows if row.get("started_at")]
            self._at[first.batch] = min([*asked, first.written_at])
        return self._at[first.batch]


def throughput(accountant: Accountant, reports: Sequence[WorkerReport], model: str, begin: Begin) -> dict[str, Any]:
    """`share_of_full` is of the live workers, each since it began: the share of the slots that their servers offered
    which requests filled, times the share of the tokens that were kept."""
    ours = [report for report in reports if report.model in ("", model)]
    servers = [server for report in ours for server in report.servers]
    active_s, tokens = _at_work(accountant, begin)
    offered, filled = sum(one.slot_s for one in servers), sum(one.busy_s for one in servers)
    kept, wasted = sum(one.tokens for one in servers), sum(sum(report.wasted.values()) for report in ours)
    is_silent = [one.silent_s for one in servers if one.in_flight]
    return {
        "tokens_per_s": round(sum(one.tokens_per_s for one in servers), 1),
        "mean_tokens_per_s": round(tokens / active_s, 1) if active_s > 0 else None,
        "active_s": round(active_s, 1),
        "share_of_full": round(filled / offered * kept / max(kept + wasted, 1), 4) if offered and kept else None,
        "silent_s": min(is_silent, default=None),
    }


def nodes(accountant: Accountant, reports: Sequence[WorkerReport]) -> list[dict[str, Any]]:
    """By node: what stands in the shards that it put, and what its live workers are at. A row that was asked twice
    counts for both."""
    found: dict[str, dict[str, Any]] = defaultdict(
        lambda: {
            "ok": 0, "truncated": 0, "failed": 0, "tokens": 0, "shards": 0, "last_shard_at": None,
            "workers": 0, "in_flight": 0, "tokens_per_s": 0.0,
        }
    )  # fmt: skip
    hosts = accountant.run.index.hosts
    for batch, entry in accountant.entries.items():
        node, counts = found[hosts.get(batch, "")], entry.counts
        assert counts is not None, "entries have counts"
        node["ok"] += counts.ok
        node["truncated"] += counts.truncated
        node["failed"] += counts.failed
        node["tokens"] += counts.tokens
        node["shards"] += 1
        node["last_shard_at"] = max(node["last_shard_at"] or 0.0, entry.written_at)
    for report in reports:
        node = found[report.host]
        node["workers"] += 1
        node["in_flight"] += report.rows_in_flight
        node["tokens_per_s"] = round(node["tokens_per_s"] + sum(server.tokens_per_s for server in report.servers), 1)
    return [{"node": name, **found[name]} for name in sorted(found)]


def _at_work(accountant: Accountant, begin: Begin) -> tuple[float, int]:
    """Seconds in which shards were made, and the tokens in them."""
    entries = sorted(accountant.entries.values(), key=lambda entry: entry.written_at)
    if not entries:
        return 0.0, 0
    times = [begin.at(accountant, entries[0]), *(entry.written_at for entry in entries)]
    active_s = sum(later - sooner for sooner, later in pairwise(times) if later - sooner <= PAUSE_S)
    return active_s, sum(entry.counts.tokens for entry in entries if entry.counts is not None)
