"""What earlier runs in the storage tell of the work to come: how long answers are, how fast, how large. Only read."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow.parquet as pq

from draftfleet.errors import CorruptFile, RunMissing, RunNewer, StorageError
from draftfleet.index import Entry
from draftfleet.names import is_again
from draftfleet.runs import Run
from draftfleet.shards import READ_FAULTS
from draftfleet.storage import Storage

RUNS = 20
"""Runs of the same target that are looked at, the newest first."""

ENOUGH_ROWS = 32
"""Answers that tell a mean length."""

RATE_SHARDS = 64
"""The newest shards of a run, from which its speed is told."""

SERVER_SHARDS = 4
"""Of those, as many are read to see how many servers answered."""

PAUSE_S = 1800.0
"""Two shards further apart than this have a pause between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Of one run. `tokens_per_s` is of one server, None where a run has too few shards to tell."""

    run: str
    answers: int
    mean_tokens: float
    bytes_per_token: float
    tokens_per_s: float | None
    servers: int


def evidence(storage: Storage, run: str, model: str) -> Evidence | None:
    """Of the run itself, else of the newest one that asked the same target. None where there are no samples."""
    try:
        names = sorted(storage.folders(), key=lambda name: name != run)
        runs = [opened for name in names if (opened := _opened(storage, name)) is not None]
        runs = [one for one in runs if one.name == run or one.info.content.get("target.model") == model]
        runs.sort(key=lambda one: (one.name != run, -one.info.created_at))
        return next((found for one in runs[:RUNS] if (found := _of(one)) is not None), None)
    except (StorageError, CorruptFile):
        return None


def _opened(storage: Storage, name: str) -> Run | None:
    try:
        return Run.open(storage, name)
    except (RunMissing, RunNewer, CorruptFile):  # somebody's folder beside ours
        return None


def _of(run: Run) -> Evidence | None:
    """From the shard index. A run that asks every turn has several answers in a row: its mean tells something else."""
    if run.info.content.get("producer.turns", "last") != "last":
        return None
    entries = [entry for batch, entry in run.index.read().items() if entry.counts is not None and not is_again(batch)]
    answers = sum(entry.counts.ok + entry.counts.truncated for entry in entries if entry.counts)
    tokens = sum(entry.counts.tokens for entry in entries if entry.counts)
    if answers < ENOUGH_ROWS or not tokens:
        return None
    newest = sorted(entries, key=lambda entry: entry.written_at)[-RATE_SHARDS:]
    servers = _servers(run, newest)
    fleet = _rate(newest)
    return Evidence(
        run=run.name,
        answers=answers,
        mean_tokens=tokens / answers,
        bytes_per_token=sum(entry.bytes for entry in entries) / tokens,
        tokens_per_s=fleet / servers if fleet and servers else None,
        servers=servers,
    )


def _rate(entries: Sequence[Entry]) -> float | None:
    """Tokens a second of all servers together, pauses left out."""
    tokens, seconds = 0, 0.0
    for before, entry in pairwise(entries):
        gap = entry.written_at - before.written_at
        if entry.counts is not None and gap < PAUSE_S:
            tokens, seconds = tokens + entry.counts.tokens, seconds + gap
    return tokens / seconds if seconds else None


def _servers(run: Run, entries: Sequence[Entry]) -> int:
    found: set[str] = set()
    for entry in entries[-SERVER_SHARDS:]:
        try:
            raw = run.read_shard("samples", entry.batch)
            found.update(pq.read_table(io.BytesIO(raw), columns=["server"]).column("server").to_pylist())
        except READ_FAULTS:
            continue
    return len(found - {""})
