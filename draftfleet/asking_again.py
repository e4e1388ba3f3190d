"""Batches that ask rows again: made, mended where a process died in it, and put into the queue."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from draftfleet import control
from draftfleet.again import Again, Superseded, names, path_of, read
from draftfleet.conversations import Sources, asks_every_turn, merged
from draftfleet.errors import CorruptFile, QueueError, RunConflict
from draftfleet.logs import event
from draftfleet.names import Split, again_id, parent_of, parts_of, split_of
from draftfleet.queue import connect, make_app, publish
from draftfleet.reconcile import model_of
from draftfleet.records import Prompt, Sample, Unfinished
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage

log = logging.getLogger(__name__)

BATCH_SIZE = 64
"""Where a run pins none."""


class Asking(NamedTuple):
    """A row that is asked again: the record that is superseded, and, where it is to go on, the answer that was cut and
    the budget of the whole. `alone`: it may end a worker or a server, so it is tried by itself."""

    record: Sample
    cut: Sample | None = None
    max_tokens: int = 0
    alone: bool = False


def create(run: Run, rows: Iterable[Asking], *, batch_size: int) -> dict[str, int]:
    """Make batches that ask these rows again, whatever became of them. Returns the batches made, with their sizes.

    Rows that another batch asks again already are left out. Batches of rows that are tried alone are split from the
    start. Raises StorageError.
    """
    again = Again(run)
    made: dict[str, int] = {}
    waiting: dict[tuple[Split, bool], list[Asking]] = defaultdict(list)
    for row in rows:
        group = row.record.split, row.alone
        waiting[group].append(row)
        if len(waiting[group]) == batch_size:
            made |= _make(run, again, waiting.pop(group), alone=group[1])
    for group, left in waiting.items():
        made |= _make(run, again, left, alone=group[1])
    return made


def open_run(settings: Settings) -> Run:
    """Raises RunMissing; RunConflict on a cancelled run."""
    run = Run.open(open_storage(settings.storage), settings.run)
    if control.read(run).state == "cancelled":
        raise RunConflict(
            f"run {run.name} is cancelled: nothing of it is asked again. `draftfleet resume` takes it up."
        )
    return run


def enqueue(settings: Settings, run: Run, rows: Iterable[Asking]) -> dict[str, int]:
    """Make batches of these rows, publish them, and say how many. Raises QueueError or StorageError."""
    app, client = make_app(settings), connect(settings)  # before anything is made: it may be away
    mended = mend(run)
    made = create(run, rows, batch_size=int(run.info.content.get("producer.batch_size") or BATCH_SIZE))
    split = run.split_sizes()
    work = [part for batch in [*mended, *made] for part in parts_of(batch, split.get(batch))]
    try:
        publish(app, client, run, model_of(run), work)
    except QueueError as error:
        raise QueueError(f"{error} The batches are made: workers publish them by themselves later.") from error
    return {"rows": sum(made.values()), "batches": len(made), "mended_batches": len(mended)}


def mend(run: Run) -> list[str]:
    """Finish what a process left that died in making a batch. Returns the batches that came to be by this call."""
    mended: list[str] = []
    for name in names(run):
        if run.has_prompts(name):
            continue
        file = read(run, name)
        try:
            sources = {parent_of(row.batch)[0] for row in file.rows}
            prompts = {one.row_key: one for source in sorted(sources) for one in run.read_prompts(source)}
            wanted = [
                _continued(run, prompts[row.row_key], *file.continued[row.row_key])
                if row.row_key in file.continued
                else _with_turns(run, prompts[row.row_key], row)
                for row in file.rows
            ]
        except (CorruptFile, FileNotFoundError, KeyError) as error:
            log.error(event("batch not mended", run=run.name, batch=name, error=str(error)))
            continue
        if _finish(run, name, wanted, alone=file.alone):
            mended.append(name)
    return mended


def _make(run: Run, again: Again, rows: Sequence[Asking], *, alone: bool) -> dict[str, int]:
    """One batch of these rows; none if all of them are asked again already."""
    while True:
        split = rows[0].record.split
        numbers = [int(name.rpartition("-")[2]) for name in again.look() if split_of(name) == split]
        asked = _half_made(again)
        left = {
            row.record.row_key: row
            for row in rows
            if not again.succeeds(row.record.batch, row.record.row_key)
            and (parent_of(row.record.batch)[0], row.record.row_key) not in asked
        }
        if not left:
            return {}
        name = again_id(split, max(numbers, default=-1) + 1)
        sources = Sources(run)
        prompts = [_prompt(sources, row) for row in left.values()]
        content: dict[str, Any] = {
            "created_at": time.time(),
            "alone": alone,
            "rows": [asdict(Superseded.of(row.record)) for row in left.values()],
        }
        if continued := {key: (row.cut.batch, row.max_tokens) for key, row in left.items() if row.cut}:
            content["continued"] = continued
        if not run.storage.put_if_absent(path_of(run, name), json.dumps(content, indent=1).encode()):
            continue  # another process was faster: look what it asks
        _finish(run, name, prompts, alone=alone)
        return {name: len(left)}


def _prompt(sources: Sources, row: Asking) -> Prompt:
    if row.cut is None:
        return sources.prompt(row.record)
    return _going_on(sources.prompt(row.cut), row.cut, row.max_tokens)


def _going_on(prompt: Prompt, cut: Sample, max_tokens: int) -> Prompt:
    unfinished = Unfinished(
        prompt_token_ids=cut.prompt_token_ids,
        token_ids=cut.token_ids,
        max_tokens=max_tokens,
        reasoning=cut.reasoning,
        reasoning_source=cut.reasoning_source,
        content=cut.content,
        seconds=cut.seconds,
    )
    return replace(prompt, unfinished=unfinished)


def _continued(run: Run, prompt: Prompt, batch: str, max_tokens: int) -> Prompt:
    """As it was to be asked to go on. Raises FileNotFoundError, CorruptFile or KeyError."""
    cut = {sample.row_key: sample for sample in run.read_samples(batch)}[prompt.row_key]
    return _going_on(merged(prompt, cut) if asks_every_turn(run) else prompt, cut, max_tokens)


def _finish(run: Run, name: str, prompts: Sequence[Prompt], *, alone: bool) -> bool:
    """The prompt shard comes last: from then on there is a batch."""
    if alone:
        run.split(name, len(prompts))
    return run.write_prompts(name, prompts)


def _half_made(again: Again) -> set[tuple[str, str]]:
    """Rows that another process is about to ask, or was about to when it died."""
    half = (name for name in names(again.run) if name not in again.rows)
    return {(parent_of(row.batch)[0], row.row_key) for name in half for row in read(again.run, name).rows}


def _with_turns(run: Run, prompt: Prompt, row: Superseded) -> Prompt:
    """With the turns that the superseded record has. Raises FileNotFoundError or CorruptFile."""
    if not row.earlier:
        return prompt
    grave = run.dead().get(row.batch)
    samples = [grave] if grave else run.read_samples(row.batch)
    return next((merged(prompt, sample) for sample in samples if sample.row_key == row.row_key), prompt)
