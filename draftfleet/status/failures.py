"""Why rows failed: how many of each class, with one example, from as many shards as a look has time for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from draftfleet.accounting import Accountant
from draftfleet.errors import CorruptFile
from draftfleet.letters import kind_of
from draftfleet.records import Sample
from draftfleet.redaction import without_answer

LOOK_S = 0.3
"""Seconds that one look spends on shards that it has not read before, the newest first."""

COLUMNS = ("outcome", "row_key", "error", "error_kind", "error_status", "server", "started_at")


class Failed(NamedTuple):
    """A row that failed, as a shard or a grave says."""

    row_key: str
    kind: str
    status: int | None
    error: str
    server: str
    at: float


class Failures:
    """Reads a few columns of shards in which rows failed, each shard once."""

    NONE: ClassVar[Mapping[str, Any]] = {"rows": 0, "classes": []}

    def __init__(self) -> None:
        self._read: dict[str, list[Failed]] = {}

    def look(self, accountant: Accountant) -> dict[str, Any]:
        """`rows` were looked at and are in `classes`, the most frequent first. Their example is the newest."""
        end = time.monotonic() + LOOK_S
        for batch in _newest(accountant):
            if batch not in self._read:
                self._read[batch] = _failed_in(accountant, batch)
                if time.monotonic() > end:
                    break
        return _by_class(one for batch, one in self._all(accountant) if _counts(accountant, batch, one.row_key))

    def _all(self, accountant: Accountant) -> Iterator[tuple[str, Failed]]:
        for batch, found in self._read.items():
            if batch in accountant.done:
                yield from ((batch, one) for one in found)
        for batch, sample in accountant.dead.items():
            yield batch, _of(sample)


def _newest(accountant: Accountant) -> list[str]:
    """The shards in which rows failed; first those that are not in the index yet."""
    written = {batch: entry.written_at for batch, entry in accountant.entries.items()}
    batches = [batch for batch, counts in accountant.counts().items() if counts.failed]
    return sorted(batches, key=lambda batch: -written.get(batch, float("inf")))


def _failed_in(accountant: Accountant, batch: str) -> list[Failed]:
    """Nothing of a shard that cannot be read, or was moved aside: the account names those."""
    try:
        rows = accountant.run.columns(batch, COLUMNS)
    except (CorruptFile, FileNotFoundError):
        return []
    return [
        Failed(
            row["row_key"],
            kind_of(row.get("error_kind"), row.get("error_status")),
            row.get("error_status"),
            row.get("error") or "",
            row.get("server") or "",
            row.get("started_at") or 0.0,
        )
        for row in rows
        if row["outcome"] == "failed"
    ]


def _of(sample: Sample) -> Failed:
    kind = kind_of(sample.error_kind, sample.error_status)
    return Failed(sample.row_key, kind, sample.error_status, sample.error or "", sample.server, sample.started_at)


def _counts(accountant: Accountant, batch: str, row_key: str) -> bool:
    """Not where the row is asked again, or an earlier record of it is better."""
    again = accountant.again
    return not again.succeeds(batch, row_key) and all(row.outcome == "failed" for row in again.before(batch, row_key))


def _by_class(failed: Iterable[Failed]) -> dict[str, Any]:
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    newest: dict[tuple[str, int | None], float] = {}
    for one in failed:
        key = one.kind, one.status
        known = found.setdefault(key, {"kind": one.kind, "status": one.status, "rows": 0})
        known["rows"] += 1
        if one.at >= newest.get(key, -1.0):
            newest[key] = one.at
            known |= {"example": without_answer(one.error), "row_key": one.row_key, "server": one.server}
    classes = sorted(found.values(), key=lambda one: (-one["rows"], one["kind"], one["status"] or 0))
    return {"rows": sum(one["rows"] for one in classes), "classes": classes}
