"""How long answers are, counted by run and source for `draftfleet.eta`: those that ended here, those in flight."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from draftfleet.lengths import bin_of
from draftfleet.live import LengthsReport
from workers.batch import Row
from workers.server import Server

Key = tuple[str, str]
"""Run id and source."""


class LengthsSeen:
    """`end` is called in the event loop, `reports` from a chore's thread."""

    def __init__(self) -> None:
        self._ended: defaultdict[Key, Counter[int]] = defaultdict(Counter)

    def end(self, row: Row) -> None:
        """A row has its sample: an answer, of all its turns, or the record of why there is none."""
        self._ended[_key(row)][bin_of(row.generated)] += 1

    def reports(self, in_flight: Iterable[tuple[Row, Server]]) -> dict[str, list[LengthsReport]]:
        """By run id. What there is of an answer in flight is told from its time and the speed of its server."""
        going: defaultdict[Key, Counter[int]] = defaultdict(Counter)
        for row, server in in_flight:
            made = tokens_made(row, server, time.monotonic() - row.since)
            going[_key(row)][bin_of(row.generated + made)] += 1
        found: defaultdict[str, list[LengthsReport]] = defaultdict(list)
        for run_id, source in sorted({*self._ended, *going}):
            key = run_id, source
            ended = dict(self._ended.get(key, Counter[int]()))
            found[run_id].append(LengthsReport(source=source, ended=ended, going=going.get(key, Counter[int]())))
        return found


def tokens_made(row: Row, server: Server, seconds: float) -> int:
    """How many the server has generated of an answer after so long, by its usual speed."""
    generated = seconds / server.seconds_per_token if server.seconds_per_token else 0
    return min(int(generated), row.sampling.max_tokens)


def _key(row: Row) -> Key:
    return row.batch.run.run_id, row.prompt.source
