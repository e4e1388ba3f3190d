"""The rows of a run for figures: of every shard the narrow columns, without texts and ids."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from draftfleet.errors import CorruptFile
from draftfleet.outcomes import Rank, each_once, order
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.shards import READ_FAULTS

READERS = 4
AHEAD = 64
"""Shards that are read before their turn."""

COLUMNS = (
    "row_key", "split", "outcome", "finish_reason", "error", "error_status", "error_kind", "reasoning_source",
    "prompt_tokens", "completion_tokens", "ids_source", "ids_match_usage", "server", "worker", "attempt", "started_at",
    "seconds", "drawn", "ended", "source", "dialect",
)  # fmt: skip
TURN_COLUMNS = tuple(f"turns.list.element.{name}" for name in ("completion_tokens", "seconds", "server"))
LONGEST_ERROR = 300


class Request(NamedTuple):
    """One answer of one server: what throughput is made of. Times are seconds since the epoch."""

    server: str
    start: float
    end: float
    tokens: int


class Row(NamedTuple):
    """A record of a row, as one shard holds it at `place`; `place` is -1 for a dead letter.

    `tokens` are those of all its turns, `seconds` of its last request. `thinking` is whether it was asked to think, or
    did where nothing was asked.
    """

    batch: str
    place: int
    row_key: str
    split: str
    outcome: str
    finish_reason: str
    error: str
    kind: str
    source: str
    thinking: bool
    prompt_tokens: int
    tokens: int
    seconds: float
    start: float
    server: str
    worker: str
    dialect: str
    attempt: int
    ids_source: str
    ids_match: bool
    ended: str
    earlier: tuple[Request, ...]

    @property
    def requests(self) -> Iterator[Request]:
        """Earlier turns have no times of their own: they are taken to have followed each other."""
        start = self.start - sum(one.end for one in self.earlier)
        last = self.tokens
        for one in self.earlier:
            yield one._replace(start=start, end=start + one.end)
            start += one.end
            last -= one.tokens
        if self.seconds > 0:
            yield Request(self.server, self.start, self.start + self.seconds, last)


@dataclass(slots=True)
class Rows:
    """`records` are all that was done, `rows` each row once: the record that counts. `corrupt` says why by batch."""

    records: list[Row] = field(default_factory=list[Row])
    rows: list[Row] = field(default_factory=list[Row])
    shards: int = 0
    corrupt: dict[str, str] = field(default_factory=dict[str, str])


def read(run: Run, batches: Sequence[str], *, step: Callable[[], object] = lambda: None) -> Rows:
    """Of these shards and of the dead letters. A shard that cannot be read, or is gone, is left out and named."""
    found = Rows()
    with ThreadPoolExecutor(READERS) as pool:
        for batch, said in _in_order(pool, batches, lambda batch: _shard(run, batch)):
            if isinstance(said, str):
                found.corrupt[batch] = said
            else:
                found.records += said
                found.shards += 1
            step()
    found.records += _dead(run)
    found.rows = list(each_once(((row.row_key, row) for row in found.records), _rank).values())
    return found


def _in_order(
    pool: ThreadPoolExecutor, items: Sequence[str], action: Callable[[str], Any]
) -> Iterator[tuple[str, Any]]:
    """As `pool.map`, with a bounded number of results that wait."""
    for first in range(0, len(items), AHEAD):
        some = items[first : first + AHEAD]
        yield from zip(some, pool.map(action, some), strict=True)


def _shard(run: Run, batch: str) -> list[Row] | str:
    """Its rows, or why it cannot be read."""
    try:
        file = pq.ParquetFile(io.BytesIO(run.read_shard("samples", batch)), page_checksum_verification=True)
        names = set(file.schema_arrow.names)
        columns = [name for name in COLUMNS if name in names]
        table = file.read([*columns, *(TURN_COLUMNS if "turns" in names else ())])
        values = {name: table[name].to_pylist() for name in table.column_names}
        return [_row(batch, place, values) for place in range(table.num_rows)]
    except FileNotFoundError:
        return "it was moved aside meanwhile"
    except READ_FAULTS as error:
        return str(error)


def _row(batch: str, place: int, values: dict[str, list[Any]]) -> Row:
    def of(name: str, otherwise: Any = "") -> Any:
        column = values.get(name)
        value = None if column is None else column[place]
        return otherwise if value is None else value

    return _made(batch, place, of, of("turns", ()))


def _made(batch: str, place: int, of: Callable[..., Any], turns: Iterable[dict[str, Any]]) -> Row:
    name = sys.intern
    drawn = of("drawn", None)
    asked = json.loads(drawn) if isinstance(drawn, str) else drawn or {}
    earlier = tuple(
        Request(name(turn["server"] or ""), 0.0, turn["seconds"] or 0.0, max(turn["completion_tokens"] or 0, 0))
        for turn in turns
    )
    status = of("error_status", 0)
    return Row(
        batch=batch,
        place=place,
        row_key=of("row_key"),
        split=name(of("split")),
        outcome=name(of("outcome")),
        finish_reason=name(of("finish_reason")),
        error=str(of("error"))[:LONGEST_ERROR],
        kind=name(f"{of('error_kind') or 'unknown'}{f' ({status})' if status else ''}" if of("error") else ""),
        source=name(of("source")),
        thinking=bool(asked.get("thinking", of("reasoning_source", "") != "")),
        prompt_tokens=of("prompt_tokens", -1),
        tokens=max(of("completion_tokens", 0), 0) + sum(one.tokens for one in earlier),
        seconds=of("seconds", 0.0),
        start=of("started_at", 0.0),
        server=name(of("server")),
        worker=name(of("worker")),
        dialect=name(of("dialect")),
        attempt=of("attempt", 1),
        ids_source=name(of("ids_source")),
        ids_match=bool(of("ids_match_usage", True)),
        ended=of("ended"),
        earlier=earlier,
    )


def of_sample(batch: str, sample: Sample) -> Row:
    """Of a dead letter."""

    def of(name: str, otherwise: Any = "") -> Any:
        value = getattr(sample, name, None)
        return otherwise if value is None else value

    turns = [
        {"server": turn.server, "seconds": turn.seconds, "completion_tokens": turn.completion_tokens}
        for turn in sample.turns
    ]
    return _made(batch, -1, of, turns)


def _dead(run: Run) -> list[Row]:
    try:
        return [of_sample(batch, sample) for batch, sample in run.dead().items()]
    except CorruptFile:
        return []


def _rank(row: Row) -> Rank:
    return order(row.outcome, len(row.earlier), row.tokens)
