"""Samples go into the run: batches of which every row is there as shards, rows of the others as partials.

A shard is put only if absent, so a worker that does the same batch at this moment loses nothing and doubles nothing:
whoever is first counts. A partial is read by the worker that takes the batch next, which then asks only the other rows.
Each of ours holds the rows of one batch, and its name says which: a worker that wants another need not read it.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from draftfleet.errors import RunMissing
from draftfleet.names import batch_of_partial, imported_partial, parts_of
from draftfleet.outcomes import best
from draftfleet.records import Sample
from draftfleet.runs import TOMBSTONES, Run
from producer.import_data.slots import Filled

WRITERS = 8
"""Files put at once: on a disk most of it is waiting for the sync, on an object store for the answer."""

GROUP = 64
"""Batches between two looks whether the run is still there, and between two writes of the index."""


@dataclass(slots=True)
class Written:
    """Rows that stand in the run by this import; and rows that another had finished meanwhile."""

    imported: int = 0
    overtaken: int = 0
    batches_done: int = 0
    batches_begun: int = 0

    def take(self, other: Written) -> None:
        self.imported += other.imported
        self.overtaken += other.overtaken
        self.batches_done += other.batches_done
        self.batches_begun += other.batches_begun


def write(run: Run, filled: Iterable[Filled], step: Callable[[], object]) -> Written:
    """Put all of it. Raises StorageError, or RunMissing if the run is deleted meanwhile."""
    total = Written()
    process = imported_partial(uuid.uuid4().hex[:12])
    with ThreadPoolExecutor(WRITERS) as pool:
        for group in _groups(filled):
            if run.storage.exists(f"{TOMBSTONES}/{run.run_id}.json"):
                raise RunMissing(f"run {run.name} was deleted while responses were imported: nothing more is written.")
            for written in pool.map(partial(_write, run, process), group):
                total.take(written)
                step()
            run.index.flush()
    return total


def _groups(filled: Iterable[Filled]) -> Iterator[list[Filled]]:
    remaining = iter(filled)
    while group := list(itertools.islice(remaining, GROUP)):
        yield group


def _write(run: Run, process: str, filled: Filled) -> Written:
    if filled.is_split:
        return _write_parts(run, filled)
    rows = _with_earlier(run, filled)
    if len(rows) == filled.num_rows:
        was_first = run.commit(filled.batch, rows)
        for name in filled.files:
            if batch_of_partial(name) == filled.batch:
                run.delete_partial(name)
        if was_first:
            return Written(imported=len(filled.samples), batches_done=1)
    elif not run.is_done(filled.batch):
        name = run.write_partial(f"{process}.{filled.batch}", 0, filled.samples)
        if not run.is_done(filled.batch):
            return Written(imported=len(filled.samples), batches_begun=1)
        run.delete_partial(name)
    return Written(overtaken=len(filled.samples))


def _write_parts(run: Run, filled: Filled) -> Written:
    """Each row of a batch that was split is a batch of its own."""
    names = parts_of(filled.batch, max(filled.parts) + 1)
    done = 0
    for part, sample in zip(filled.parts, filled.samples, strict=True):
        name = names[part]
        done += not run.is_done(filled.batch) and run.commit(name, [replace(sample, batch=name)])
    return Written(imported=done, overtaken=len(filled.samples) - done, batches_done=done)


def _with_earlier(run: Run, filled: Filled) -> list[Sample]:
    """These rows and what partials hold of the batch, in the order of its prompts as far as that is known."""
    if not filled.files:
        return list(filled.samples)
    earlier = [sample for name in filled.files for sample in run.read_partial(name)]
    ours = [sample for sample in earlier if sample.batch.partition(".")[0] == filled.batch]
    kept = best([*ours, *filled.samples])
    return [replace(sample, batch=filled.batch) for sample in _in_order(run, filled.batch, kept.values())]


def _in_order(run: Run, batch: str, samples: Iterable[Sample]) -> Sequence[Sample]:
    places = {prompt.row_key: place for place, prompt in enumerate(run.read_prompts(batch))}
    return sorted((one for one in samples if one.row_key in places), key=lambda sample: places[sample.row_key])
