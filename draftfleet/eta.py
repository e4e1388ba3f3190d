"""When a run will be finished: what is left to be made, over what the servers make, and the tail of the last answers.

    rows that wait * mean tokens of an answer / tokens per second with all slots taken     until the last row has begun
    + tokens of the longest answer that is then in flight / tokens per second of a request      until it has ended

The mean is no mean of what has ended: see `lengths.py`. Where rows of several sources wait, each source has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from draftfleet import drawing
from draftfleet.accounting import Accountant, Accounting
from draftfleet.lengths import Lengths, tokens_of
from draftfleet.live import LengthsReport, RunReport, ServerReport, WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """`seconds` is None where it cannot be told, and `why` says why. `tokens_left` are those still to be made.

    `capacity_tokens_per_s` is what the ready servers make with all the slots taken that they may have.
    `is_final` is False while the producer still adds rows: then it counts those that are there.
    """

    seconds: float | None = None
    why: str = ""
    rows_left: int = 0
    tokens_left: float | None = None
    mean_tokens: float | None = None
    capacity_tokens_per_s: float = 0.0
    is_final: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def of_run(accountant: Accountant, account: Accounting, reports: Sequence[WorkerReport]) -> Estimate:
    """Of a run as it was accounted for just now."""
    run = accountant.run
    sources = {one.source for report in reports for part in report.runs for one in part.lengths}
    return estimate(
        reports,
        run.run_id,
        pending=account.pending,
        max_tokens=drawing.max_tokens(drawing.asked(run)),
        waiting=accountant.sources_waiting() if len(sources) > 1 else {},
        in_shards=(account.ok + account.truncated, account.tokens),
        is_final=account.expected is not None,
    )


def estimate(
    reports: Sequence[WorkerReport],
    run_id: str,
    *,
    pending: int,
    max_tokens: int,
    waiting: Mapping[str, float] | None = None,
    in_shards: tuple[int, int] = (0, 0),
    is_final: bool = True,
) -> Estimate:
    """From what the workers tell of a run of which `pending` rows stand in no shard.

    `waiting` are the shares by source among rows that wait, where there are several sources. `in_shards` are the rows
    in shards and their tokens: their mean counts where the workers have seen fewer, after a restart.
    """
    parts = [(report, part) for report in reports for part in report.runs if part.run_id == run_id]
    seen = [lengths for _, part in parts for lengths in part.lengths]
    ended, going = _total(one.ended for one in seen), _total(one.going for one in seen)
    in_flight = going.total()
    waits = max(pending - in_flight - sum(part.ok + part.truncated + part.failed for _, part in parts), 0)
    servers = [server for report in reports for server in report.servers if server.state == "ready" and server.speed]
    capacity = sum(server.limit * server.speed for server in servers)
    known = Estimate(rows_left=waits + in_flight, capacity_tokens_per_s=capacity, is_final=is_final)
    if not waits + in_flight:
        return replace(known, seconds=0.0, tokens_left=0.0)
    lengths = Lengths.of(ended, going, max_tokens)
    if not servers or not in_flight or lengths is None:
        return replace(known, why=_why_unknown(reports, servers, in_flight))
    mean = lengths.mean
    if in_shards[0] > ended.total():
        mean = in_shards[1] / in_shards[0]
    elif waiting:
        mean = _mean_of(waiting, seen, max_tokens, otherwise=mean)
    begun = [tokens_of(number) for number in sorted(going.elements())]
    until_begun_s = 0.0
    if waits > in_flight:
        until_begun_s = waits * mean / (capacity * _share(parts, in_flight))
        last = lengths.in_flight(in_flight)
    else:  # they all begin while those in flight end
        last = np.array([0.0] * waits + begun)
    return replace(
        known,
        seconds=until_begun_s + lengths.until_all_ended(last, _spread(servers, len(last))),
        tokens_left=waits * mean + sum(map(lengths.beyond, begun)),
        mean_tokens=mean,
    )


def _total(counts: Iterable[Mapping[int, int]]) -> Counter[int]:
    return sum(map(Counter[int], counts), Counter[int]())


def _mean_of(
    waiting: Mapping[str, float], seen: Sequence[LengthsReport], max_tokens: int, *, otherwise: float
) -> float:
    """The mean of the rows that wait, by their sources. One of which too few have ended counts as all do."""
    mean = 0.0
    for source, share in waiting.items():
        own = [one for one in seen if one.source == source]
        lengths = Lengths.of(_total(one.ended for one in own), _total(one.going for one in own), max_tokens)
        mean += share * (otherwise if lengths is None else lengths.mean)
    return mean


def _spread(servers: Sequence[ServerReport], num: int) -> npt.NDArray[np.float64]:
    """`(num,)` tokens per second of answers, short and long ones in the same way over all slots."""
    slots = sorted(((place + 0.5) / one.limit, one.speed) for one in servers for place in range(one.limit))
    return np.resize([speed for _, speed in slots] or [0.0], num)


def _share(parts: Sequence[tuple[WorkerReport, RunReport]], in_flight: int) -> float:
    """How much of the slots that are taken this run has, beside other runs of the same servers."""
    return in_flight / max(sum(report.rows_in_flight for report, _ in parts), in_flight)


def _why_unknown(reports: Sequence[WorkerReport], servers: Sequence[ServerReport], in_flight: int) -> str:
    if not reports:
        return "no worker is there"
    if not servers:
        return "no server is ready and has answered"
    return "too few answers have ended" if in_flight else "no row of it is in flight"
