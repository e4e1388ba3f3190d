"""`draftfleet continue`: answers that were cut at their length go on from their exact ids, with a larger budget.

The row is asked again in a batch of its own (draftfleet.again), and its answer supersedes the cut one: ok beats
truncated, and of two that were cut the longer counts. Where going on fails, the cut answer stands.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

from draftfleet import asking_again
from draftfleet.again import Again
from draftfleet.asking_again import Asking
from draftfleet.errors import CorruptFile, SettingsError
from draftfleet.letters import indexed
from draftfleet.logs import event
from draftfleet.names import parent_of
from draftfleet.outcomes import best
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings

log = logging.getLogger(__name__)

SHARDS_KEPT = 16
"""Shards of rows that were asked again: one look at a row may need several."""


def go_on(settings: Settings, *, max_tokens: int, dry_run: bool) -> dict[str, Any]:
    """Let all cut answers go on that can, up to `max_tokens` for the whole of each. `left_out` counts the others.

    Raises SettingsError, RunConflict on a cancelled run, QueueError, StorageError.
    """
    if max_tokens < 1:
        raise SettingsError(f"--max-tokens {max_tokens}: give the budget of a whole answer, what is there included.")
    run = asking_again.open_run(settings)
    left_out, failed_before = Counter[str](), Counter[str]()
    rows = _asked(run, max_tokens, left_out, failed_before)
    if dry_run:
        said: dict[str, Any] = {"dry_run": True, "rows": sum(1 for _ in rows)}
    else:
        said = asking_again.enqueue(settings, run, rows)
    return said | {"left_out": dict(left_out), "failed_before": dict(failed_before)}


def _asked(run: Run, max_tokens: int, left_out: Counter[str], failed_before: Counter[str]) -> Iterator[Asking]:
    """The rows that are asked. Counts the others by why not, and of those that are the errors of earlier tries."""
    for cut, record in cut_rows(run, left_out):
        if reason := _why_not(cut, max_tokens):
            left_out[reason] += 1
            continue
        if record.outcome == "failed":
            failed_before[_short(record.error or "")] += 1
        yield Asking(record, cut, max_tokens)


def _why_not(cut: Sample, max_tokens: int) -> str | None:
    """Why an answer cannot go on; docs/continue.md says each at length."""
    if cut.finish_reason != "length":
        return "ended otherwise"
    if cut.ids_source != "engine" or not cut.ids_match_usage or not cut.prompt_token_ids:
        return "without exact ids"
    if cut.tools:
        return "with tools"
    return "long enough" if len(cut.token_ids) >= max_tokens else None


def cut_rows(run: Run, left_out: Counter[str]) -> Iterator[tuple[Sample, Sample]]:
    """Each row that counts as truncated: the answer, and the last record of the row, which is another one where a later
    try failed. Rows that are being asked are counted as `being asked`, shards that cannot be read as such."""
    again = Again(run)
    again.look()
    sizes, split, dead = run.done_bytes(), run.split_sizes(), run.dead()
    counts = indexed(run, sizes)
    records = _Records(run, again, sizes, dead)
    families: dict[str, list[str]] = {}
    for batch in sizes:
        families.setdefault(parent_of(batch)[0], []).append(batch)
    for parent, names in families.items():
        known = counts.get(parent)
        if parent not in split and known is not None and not known.truncated:
            continue
        try:
            for sample in best(sample for name in names for sample in run.read_samples(name)).values():
                if sample.outcome == "truncated" and (last := records.last(sample)) is not None:
                    yield sample, last
        except CorruptFile as error:
            left_out["in damaged shards"] += known.truncated if known else 1
            log.warning(event("shard not read", run=run.name, batch=parent, error=error))
    left_out["being asked"] += records.num_being_asked
    left_out += Counter()  # what is 0 is not told


class _Records:
    """What other batches say of rows of which one has an answer that was cut."""

    def __init__(self, run: Run, again: Again, done: Collection[str], dead: dict[str, Sample]) -> None:
        self.num_being_asked = 0
        self._again = again
        self._done: dict[str, list[str]] = {}
        for batch in done:
            self._done.setdefault(parent_of(batch)[0], []).append(batch)
        self._dead: dict[str, list[Sample]] = {}
        for batch, sample in dead.items():
            self._dead.setdefault(parent_of(batch)[0], []).append(sample)
        self._read = lru_cache(SHARDS_KEPT)(run.read_samples)

    def last(self, cut: Sample) -> Sample | None:
        """The last record of the row; None where this answer is not what counts, or the row is being asked."""
        last, found = cut, [cut]
        for batch in self._again.after(cut.batch, cut.row_key):
            record = self._of(batch, cut.row_key)
            if record is None:
                self.num_being_asked += 1
                return None
            last = record
            found.append(record)
        for row in reversed(self._again.before(cut.batch, cut.row_key)):
            record = self._of(row.batch, cut.row_key)
            found = [record, *found] if record else found
        return last if best(found)[cut.row_key] is cut else None

    def _of(self, batch: str, row_key: str) -> Sample | None:
        parent = parent_of(batch)[0]
        said = [sample for name in self._done.get(parent, ()) for sample in self._read(name)]
        return best(one for one in [*said, *self._dead.get(parent, ())] if one.row_key == row_key).get(row_key)


def _short(text: str) -> str:
    """Without the row's own name, so that equal errors are one."""
    return text.partition(" on ")[2] or text
