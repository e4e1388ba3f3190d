"""What the workers say of themselves while they run, for `draftfleet status` and progress bars. Nothing depends on it.

draftfleet:live:PROCESS    JSON of one WorkerReport; gone LIVE_S seconds after its process fell silent
"""

from __future__ import annotations

from typing import Any, Literal

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

PUBLISH_S = 2
"""Seconds between reports."""

LIVE_S = 15
"""A process that has not reported for this many seconds is no longer shown."""

WorkerState = Literal["waiting", "working", "paused", "draining"]
ServerState = Literal["waiting", "ready", "away", "mismatched", "resting", "absent"]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class GaugesReport(Part):
    """What the server says of its load; null where it says nothing. `kv` is the used share of its KV cache."""

    running: float | None = None
    waiting: float | None = None
    kv: float | None = None
    preemptions: float | None = None
    generated_tokens: float | None = None


class ServerReport(Part):
    """`limit` is how many requests it may get at once, as of now, and `because` why it is that many. `speed` are the
    tokens per second of one request; 0 until one has ended.

    `slot_s` are the seconds of slots that it offered while it was ready and this process held batches, `busy_s` those
    that a request filled. `silent_s`: for so long it holds requests of ours and neither ends one nor moves on.
    """

    url: str
    state: ServerState
    reason: str = ""
    in_flight: int
    limit: int
    pinned: bool = False
    because: str = ""
    gauges: GaugesReport | None = None
    rows: int
    tokens: int
    tokens_per_s: float
    slot_s: float = 0.0
    busy_s: float = 0.0
    silent_s: float = 0.0
    speed: float = 0.0


class LengthsReport(Part):
    """Answers of rows of one source, counted by `lengths.bin_of` of their tokens: those that ended since this process
    began, and those in flight by what there is of them."""

    source: str
    ended: dict[int, int] = Field(default_factory=dict[int, int])
    going: dict[int, int] = Field(default_factory=dict[int, int])


class RunReport(Part):
    """Rows that are finished on this process and stand in no shard yet. Shards and these together are the progress."""

    run: str
    run_id: str
    ok: int = 0
    truncated: int = 0
    failed: int = 0
    tokens: int = 0
    lengths: list[LengthsReport] = Field(default_factory=list[LengthsReport])


class WorkerReport(Part):
    """`waiting`: no server is ready. `paused`: the storage cannot be written. Times are seconds since the epoch.

    `version` is the product's; empty where an older one reports. `wasted` are tokens that were generated for nothing
    since the process began, by cause.
    """

    process: str
    host: str
    pid: int
    started_at: float
    state: WorkerState
    reason: str = ""
    model: str = ""
    version: str = ""
    servers: list[ServerReport] = Field(default_factory=list[ServerReport])
    batches_held: int = 0
    rows_waiting: int = 0
    rows_in_flight: int = 0
    wasted: dict[str, int] = Field(default_factory=dict[str, int])
    runs: list[RunReport] = Field(default_factory=list[RunReport])

    def to_json(self) -> dict[str, Any]:
        return self.model_dump()


def publish(client: redis.Redis, report: WorkerReport) -> None:
    """Replace the last report of this process. May raise redis.RedisError."""
    client.set(f"draftfleet:live:{report.process}", report.model_dump_json(), ex=LIVE_S)


def withdraw(client: redis.Redis, process: str) -> None:
    """The process ends: it is no longer shown. May raise redis.RedisError."""
    client.delete(f"draftfleet:live:{process}")


def read(client: redis.Redis) -> list[WorkerReport]:
    """The reports of all live processes, by name. One of another version that cannot be read is left out."""
    names = sorted(str(name) for name in client.scan_iter("draftfleet:live:*", count=1000))
    reports: list[WorkerReport] = []
    for raw in client.mget(names) if names else []:
        try:
            reports.append(WorkerReport.model_validate_json(raw or ""))
        except ValidationError:
            continue
    return reports
