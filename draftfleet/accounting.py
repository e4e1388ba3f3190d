"""Where every row of a run stands. Two identities hold at any moment, and nothing else exists:

    lines read       = prompts + duplicates + malformed + rejected      (the producer's, per pass)
    expected samples = ok + truncated + failed + pending

`expected` comes from the producer's totals once the run is sealed, prompts times sampling.n, and the other side from
shards, dead letters and outstanding batches, so that the second identity is a check and not a definition.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftfleet.again import Again
from draftfleet.errors import CorruptFile
from draftfleet.index import Entry
from draftfleet.names import parent_of
from draftfleet.outcomes import Counts, each_once, rank
from draftfleet.records import Sample
from draftfleet.runs import Run

LOOKED_INTO = 24
"""Prompt shards that are read to tell which sources wait: each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """The rows of a run by outcome, and its batches by state. `expected` is None until the run is sealed.

    `not_continued` are truncated rows of which the last try to go on failed: the answer that was cut stands.
    A conversation is one row, whose assistant turns are counted in `turns`; `ended` are conversations that ended before
    their source did, by why.
    """

    run: str
    expected: int | None
    ok: int
    truncated: int
    failed: int
    pending: int
    tokens: int
    mismatched: int
    not_continued: int
    turns: int
    ended: dict[str, int]
    batches: int
    done: int
    split: int
    dead: int
    corrupt: list[str] = field(default_factory=list[str])

    @property
    def rows(self) -> int:
        """All rows known so far."""
        return self.ok + self.truncated + self.failed + self.pending

    @property
    def holds(self) -> bool:
        """Whether the identity holds. True while the run is not sealed: there is nothing to compare with."""
        return self.expected is None or self.expected == self.rows

    @property
    def is_complete(self) -> bool:
        return self.expected is not None and self.pending == 0


class Accountant:
    """Accounts for one run, again and again: what cannot change any more is read once.

    Of the last account are `done`, the shards with their sizes in bytes, and `dead`, the rows that were given up.
    `entries` are the lines of the index about those shards, by batch; one that is not in it yet has none. `again` are
    the rows that are asked again.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.done: dict[str, int] = {}
        self.dead: dict[str, Sample] = {}
        self.entries: dict[str, Entry] = {}
        self._samples: dict[str, Entry] = {}
        self._prompts: dict[str, Entry] = {}
        self._counts: dict[tuple[str, int], Counts] = {}
        self._by_row: dict[tuple[str, int], dict[str, Counts]] = {}
        self._sizes: dict[str, int] = {}
        self._outstanding: list[str] = []
        self._sources: dict[str, Counter[str]] = {}
        self.again = Again(run)

    def account(self) -> Accounting:
        """Read the run from storage. Raises CorruptFile if run.json or a prompt shard is."""
        sealed = self.run.sealed()  # first: what is sealed is then listed
        done = self.done = self.run.done_bytes()
        split = self.run.split_sizes()
        dead = self.dead = self.run.dead()
        self._outstanding = outstanding = self.run.outstanding(done, dead)
        self._samples, self._prompts = self.run.index.read("samples"), self.run.index.read("prompts")
        self.entries = {
            batch: entry
            for batch, entry in self._samples.items()
            if entry.counts is not None and entry.bytes == done.get(batch)
        }
        counts, corrupt = self._done(done, split, dead)
        again = self.again.correction(set(done), outstanding, split, dead, corrupt)
        counts += again.counts
        return Accounting(
            run=self.run.name,
            expected=None if sealed is None else int(sealed.get("samples", sealed["prompts"])),
            ok=counts.ok,
            truncated=counts.truncated,
            failed=counts.failed,
            pending=sum(self._size(batch) for batch in [*outstanding, *corrupt]) + again.pending,
            tokens=counts.tokens,
            mismatched=counts.mismatched,
            not_continued=again.not_continued,
            turns=counts.turns,
            ended={
                "tool_calls": counts.cut_short_ok,
                "truncated": counts.cut_short_truncated,
                "failed": counts.cut_short_failed,
            },
            batches=len(self.run.batches()),
            done=len(done) - len(corrupt),
            split=len(split),
            dead=len(dead) + again.dead,
            corrupt=corrupt,
        )

    def counts(self) -> dict[str, Counts]:
        """Of each shard of the last account, as far as it is known without reading it."""
        read = {batch: counts for (batch, size), counts in self._counts.items() if self.done.get(batch) == size}
        return read | {batch: entry.counts for batch, entry in self.entries.items() if entry.counts is not None}

    def sources_waiting(self) -> dict[str, float]:
        """Shares by source among the rows that stood in no shard at the last look, from batches all over them."""
        rows = Counter[str]()
        for batch in self._outstanding[:: max(len(self._outstanding) // LOOKED_INTO, 1)]:
            if batch not in self._sources:
                self._sources[batch] = Counter(prompt.source for prompt in self.run.read_prompts(batch))
            rows += self._sources[batch]
        return {source: num / rows.total() for source, num in rows.items()}

    def _done(
        self, done: Mapping[str, int], split: dict[str, int], dead: dict[str, Sample]
    ) -> tuple[Counts, list[str]]:
        """Counts over all shards and dead letters, each row once, and the shards that cannot be read."""
        total, corrupt = Counts(), list[str]()
        families: dict[str, list[str]] = defaultdict(list)
        for batch, size in done.items():
            if parent_of(batch)[0] in split:
                families[parent_of(batch)[0]].append(batch)
                continue
            try:
                total += self._of(batch, size)
            except CorruptFile:
                corrupt.append(batch)
        graves: dict[str, list[Sample]] = defaultdict(list)
        for batch, sample in dead.items():
            graves[parent_of(batch)[0]].append(sample)
        for parent in split:
            try:
                said = [self._rows(batch, done[batch]) for batch in families[parent]]
            except CorruptFile:
                corrupt.extend(families[parent])
                continue
            said += [{sample.row_key: Counts.of([sample])} for sample in graves[parent]]
            total += Counts.total(list(each_once((row for rows in said for row in rows.items()), rank).values()))
        total += Counts.of(sample for batch, sample in dead.items() if parent_of(batch)[0] not in split)
        return total, corrupt

    def _of(self, batch: str, size: int) -> Counts:
        """From the index; from the shard where its line is missing, or is about a file of another size."""
        entry = self._samples.get(batch)
        if entry is not None and entry.bytes == size and entry.counts is not None:
            return entry.counts
        key = batch, size
        if key not in self._counts:
            self._counts[key] = self.run.counts(batch)
        return self._counts[key]

    def _rows(self, batch: str, size: int) -> dict[str, Counts]:
        """What a shard says of each row: of those that stand beside others of the same row."""
        key = batch, size
        if key not in self._by_row:
            self._by_row[key] = self.run.outcomes(batch)
        return self._by_row[key]

    def _size(self, batch: str) -> int:
        if parent_of(batch)[1] is not None:
            return 1
        if (entry := self._prompts.get(batch)) is not None:
            return entry.rows
        if batch not in self._sizes:
            self._sizes[batch] = len(self.run.read_prompts(batch))
        return self._sizes[batch]


def to_json(accounting: Accounting) -> dict[str, Any]:
    names = (
        "run",
        "expected",
        "ok",
        "truncated",
        "failed",
        "pending",
        "tokens",
        "mismatched",
        "not_continued",
        "turns",
        "ended",
    )
    batches = {name: getattr(accounting, name) for name in ("batches", "done", "split", "dead", "corrupt")}
    return {name: getattr(accounting, name) for name in names} | {
        "batches": batches,
        "identity_holds": accounting.holds,
    }
