"""From prompts to batches of one split, and from batches to prompt shards and references in the queue.

A shard is written before its reference is published: a crash in between leaves a batch that the reconciler, or the
next `produce`, publishes. Batch numbers are dense and shards are put in their order, each only if absent, so that two
producers that both went on from the same shards cannot both succeed: who meets the other's number puts nothing beyond.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from draftfleet.errors import RunBusy
from draftfleet.names import Split, batch_id, is_again, split_of
from draftfleet.records import Prompt
from draftfleet.runs import Run

SPLITS: tuple[Split, ...] = ("train", "heldout")
WAITING_BATCHES = 64
"""Full batches that may wait to be written, and so the largest group that is put and published at once."""

Batch = tuple[str, list[Prompt]]
Publish = Callable[[list[str]], object]
Note = Callable[[Batch], object]


def next_numbers(batches: Iterable[str]) -> dict[Split, int]:
    """The number that the next batch of each split gets, after these."""
    numbers: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    for batch in batches:
        split = split_of(batch)
        numbers[split] = max(numbers[split], int(batch.rpartition("-")[2]) + 1)
    return numbers


def first_asked(batches: Iterable[str]) -> list[str]:
    """Without the batches that ask rows again: their prompts are those of others."""
    return [batch for batch in batches if not is_again(batch)]


class Batches:
    """Collects prompts by split and hands each full batch on.

    Each prompt is put in `samples` times, always into one batch, which may thus be longer than `size` by less than
    that: whatever a crash leaves, no prompt has some of its samples asked and others not.
    """

    def __init__(
        self, size: int, first: Mapping[Split, int], hand_on: Callable[[Batch], None], *, samples: int = 1
    ) -> None:
        self._size = size
        self._samples = samples
        self._numbers = dict(first)
        self._hand_on = hand_on
        self._open: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}

    def add(self, prompt: Prompt) -> None:
        waiting = self._open[prompt.split]
        waiting += [replace(prompt, sample=number) for number in range(self._samples)]
        if len(waiting) >= self._size:
            self._close(prompt.split)

    def close(self) -> None:
        """Hand on what is left of each split."""
        for split, waiting in self._open.items():
            if waiting:
                self._close(split)

    def _close(self, split: Split) -> None:
        self._hand_on((batch_id(split, self._numbers[split]), self._open[split]))
        self._numbers[split] += 1
        self._open[split] = []


class Writer:
    """Writes prompt shards and publishes them, in order, in a thread: reading goes on while the disk syncs.

    Each round takes all that waits. A slow source has each batch published as it fills; a fast one is put and published
    in groups. `may_write` is asked before each group and raises where this producer has lost its right to the run.
    `note` is told, in the thread, of each batch whose shard is there. On a clean exit everything is written and
    published; an error in the thread is raised by the next `put`, or at the exit.
    """

    def __init__(self, run: Run, publish: Publish, may_write: Callable[[], None], note: Note) -> None:
        self.num_written = 0
        self._run = run
        self._publish = publish
        self._may_write = may_write
        self._note = note
        self._waiting: queue.Queue[Batch | None] = queue.Queue(WAITING_BATCHES)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="prompt shards", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Full batches are written even when the reading failed: they are good, and the next `produce` skips them."""
        self._waiting.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def put(self, batch: Batch) -> None:
        """Hand a full batch over; waits while too many wait."""
        if self._error is not None:
            raise self._error
        self._waiting.put(batch)

    def _work(self) -> None:
        more = True
        while more:
            group, more = self._next_group()
            if self._error is None:
                try:
                    self._write(group)
                except BaseException as error:  # carried over to the reading thread, which raises it
                    self._error = error

    def _next_group(self) -> tuple[list[Batch], bool]:
        """What waits now, at least one batch; False once the end was reached."""
        group: list[Batch] = []
        batch = self._waiting.get()
        while batch is not None:
            group.append(batch)
            if len(group) == WAITING_BATCHES or self._waiting.empty():
                return group, True
            batch = self._waiting.get()
        return group, False

    def _write(self, group: list[Batch]) -> None:
        if not group:
            return
        self._may_write()
        if self.num_written == 0:
            self._run.unseal()
        num_put = self._run.write_prompts_of(group)
        if num_put < len(group):
            raise RunBusy(
                f"run {self._run.name}: batch {group[num_put][0]} was put by another producer in the meantime. "
                "One producer per run at a time: stop the other one, then produce again; nothing is doubled."
            )
        self.num_written += num_put
        for batch in group:
            self._note(batch)
        self._publish([batch for batch, _ in group])
