"""From sample shards to batches of training rows, in an order that can be replayed.

The feed follows the shards of a run as they land. What it admits at one look is written in the journal, and the order
of the rows depends on the seed, the journal and the position alone: a resumed training sees the same batches again.

    epoch 0    admission after admission, as they came; it waits for more while the run is not complete
    epoch 1..  all rows, shuffled anew
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from threading import Event
from typing import Any, Literal, NamedTuple, Self

import torch

from draftfleet import control
from draftfleet.errors import CorruptFile, TrainingError
from draftfleet.logs import event
from draftfleet.names import is_again, parent_of, split_of
from draftfleet.outcomes import best
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import Trainer
from draftfleet.training_rows import TurnRow, rows_of, turn_key
from trainer.batches import Kept, plan
from trainer.team import Team

log = logging.getLogger(__name__)

MIN_COMPLETION_TOKENS = 3
"""A draft takes one token of the answer as input and the next as label; the target itself gives the first."""

SHARDS_PER_ADMISSION = 64
"""So that training on a run with a long backlog starts after reading this many shards, not all of them."""

STOP_LOOK_S = 0.1
"""How long a wait for samples goes on after it was asked to end."""

Reason = Literal["failed", "heldout", "ids_differ_from_usage", "outside_vocabulary", "too_short"]


class Position(NamedTuple):
    """The next batch. `part` is an admission in epoch 0, and 0 in every later epoch."""

    epoch: int
    part: int
    batch: int


START = Position(0, 0, 0)


@dataclass(slots=True)
class Journal:
    """The shards that were admitted, look by look. `complete` once epoch 0 has met the end of the run."""

    admissions: list[list[str]] = field(default_factory=list[list[str]])
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value)


class Step(NamedTuple):
    """The batches of one optimizer step, over all processes, and where the next step begins."""

    batches: list[list[Kept]]
    epochs: list[int]  # of each batch
    then: Position


class Look(NamedTuple):
    """What process 0 saw in the run's folder."""

    shards: list[str]
    complete: bool
    stop: bool


def training_rows(sample: Sample, *, max_tokens: int, vocab_size: int) -> dict[str, Kept | Reason]:
    """By key the turns of a sample: the exact ids, cut to `max_tokens`; or why the turn is not trained on."""
    if sample.split != "train":
        return {sample.row_key: "heldout"}
    rows: dict[str, Kept | Reason] = {
        row.key: training_row(row, max_tokens=max_tokens, vocab_size=vocab_size) for row in rows_of(sample)
    }
    if sample.outcome == "failed":
        rows[turn_key(sample.row_key, len(sample.turns))] = "failed"
    return rows


def training_row(row: TurnRow, *, max_tokens: int, vocab_size: int) -> Kept | Reason:
    if not row.ids_match_usage:
        return "ids_differ_from_usage"
    ids = (row.prompt_token_ids + row.token_ids)[:max_tokens]
    num_prompt_tokens = len(row.prompt_token_ids)
    if num_prompt_tokens == 0 or len(ids) - num_prompt_tokens < MIN_COMPLETION_TOKENS:
        return "too_short"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return "outside_vocabulary"
    return Kept(row.key, torch.tensor(ids, dtype=torch.int32), num_prompt_tokens)


def kept_rows(run: Run, batches: Iterable[str], *, max_tokens: int, vocab_size: int) -> Iterator[list[Kept]]:
    """Of each of these shards that can be read, what is trained on."""
    for batch in batches:
        try:
            samples = run.read_samples(batch)
        except (CorruptFile, FileNotFoundError):
            continue
        turns = [training_rows(one, max_tokens=max_tokens, vocab_size=vocab_size).values() for one in samples]
        yield [row for rows in turns for row in rows if isinstance(row, Kept)]


def is_finished(run: Run) -> bool:
    """Whether no more shards of training rows will come: a run that was cancelled ends with what there is."""
    if control.read(run).state == "cancelled":
        return True
    return run.sealed() is not None and all(split_of(batch) != "train" for batch in run.outstanding())


class Feed:
    """The rows of a run, admitted as their shards land. The same on every process of the team.

    One thread may draw steps while another asks how it stands.
    """

    def __init__(
        self,
        run: Run,
        knobs: Trainer,
        vocab_size: int,
        team: Team,
        *,
        journal: Journal | None = None,
        stop: Event | None = None,
        on_wait: Callable[[Feed], None] = lambda _: None,
        inspect: Callable[[list[Sample]], None] = lambda _: None,
    ) -> None:
        self.journal = Journal()
        self.corrupt: set[str] = set()
        self.waited_s = 0.0
        self.is_waiting = False
        self._run = run
        self._knobs = knobs
        self._max_tokens = min(knobs.max_length, knobs.batch_tokens)
        self._vocab_size = vocab_size
        self._team = team
        self._stop = stop or Event()
        self._closed = Event()
        self._parted = False
        self._on_wait = on_wait
        self._inspect = inspect
        self._rows: list[list[Kept]] = []
        self._admitted: set[str] = set()
        self._refused: dict[str, Reason] = {}
        self._heldout: dict[str, int] = {}
        self._fetched: dict[str, list[Sample]] = {}
        self._replay(journal or Journal())

    @property
    def num_rows(self) -> int:
        return len(self._admitted)

    @property
    def not_trained(self) -> dict[str, int]:
        """Turns that are not trained on, by reason."""
        counts = Counter[str](self._refused.copy().values())
        # A batch that was split may have a shard of its own and shards of its single rows.
        counts["heldout"] += sum(
            rows
            for batch, rows in self._heldout.copy().items()
            if parent_of(batch)[1] is None or parent_of(batch)[0] not in self._heldout
        )
        return {reason: count for reason, count in sorted(counts.items()) if count}

    def journal_now(self) -> Journal:
        """A copy that stays as it is. It never says complete and lacks a shard."""
        complete = self.journal.complete
        return Journal(list(self.journal.admissions), complete)

    def close(self) -> None:
        """End a wait for samples, also one in another thread: no more steps are wanted."""
        self._closed.set()

    def part(self) -> None:
        """Once nobody draws steps: let no process wait for a look of process 0's. Every process must call it."""
        while not self._parted:
            self._share()

    def steps(self, position: Position, num_batches: int) -> Iterator[Step]:
        """Steps of `num_batches` batches each, without end; it ends when the stop flag is set during a wait.

        Raises TrainingError if the run is complete and has no row to train on.
        """
        batches = self._batches(position)
        while len(step := list(islice(batches, num_batches))) == num_batches:
            yield Step([rows for rows, _ in step], [then.epoch for _, then in step], step[-1][1])

    def _batches(self, position: Position) -> Iterator[tuple[list[Kept], Position]]:
        epoch, part, first = position
        while True:
            if epoch == 0 and part == len(self._rows) and not self.journal.complete and not self._follow():
                return
            if epoch == 0 and part == len(self._rows):
                self._refuse_if_empty()
                epoch, part, first = 1, 0, 0
            rows = self._rows[part] if epoch == 0 else [row for rows in self._rows for row in rows]
            order = plan(rows, self._knobs.batch_tokens, f"{self._knobs.seed} {epoch} {part}")
            for number, batch in enumerate(order[first:], start=first):
                yield batch, Position(epoch, part, number + 1)
            epoch, part, first = (0, part + 1, 0) if epoch == 0 else (epoch + 1, 0, 0)

    def _follow(self) -> bool:
        """Wait until shards landed or the run is complete. False if asked to stop."""
        began = time.monotonic()
        try:
            while not (look := self._share()).stop:
                if look.shards or look.complete:
                    self._admit(look.shards)
                    self.journal.complete = look.complete
                    return True
                self.is_waiting = True
                self._on_wait(self)
                self._pause()
            return False
        finally:
            self.waited_s += time.monotonic() - began
            self.is_waiting = False

    def _share(self) -> Look:
        look = self._team.share(self._look() if self._team.leads else None)
        self._parted = look.stop
        return look

    def _pause(self) -> None:
        """Until the next look is due, or there will be none."""
        due = time.monotonic() + self._knobs.poll_s
        while not (self._stop.is_set() or self._closed.is_set()) and (left_s := due - time.monotonic()) > 0:
            self._closed.wait(min(left_s, STOP_LOOK_S))

    def _look(self) -> Look:
        """What is new. A corrupt shard is left out until it has been moved aside and done again."""
        if self._stop.is_set() or self._closed.is_set():
            return Look([], complete=False, stop=True)
        # Asked before the listing, so that a run found finished has no shard that the listing lacks.
        finished = is_finished(self._run)
        done = self._run.done()
        self._count_heldout(done)
        self.corrupt &= set(done)
        known = {shard for shards in self.journal.admissions for shard in shards} | self.corrupt
        new = [batch for batch in done if split_of(batch) == "train" and batch not in known]
        complete = finished and not new
        # Before it is said to be complete: a corrupt shard may have been done again between two looks.
        taken = sorted(self.corrupt) if complete else new[:SHARDS_PER_ADMISSION]
        self._fetched = {batch: samples for batch in taken if (samples := self._read(batch)) is not None}
        for samples in self._fetched.values():
            self._inspect(samples)
        return Look(list(self._fetched), complete=complete and not self._fetched, stop=False)

    def _read(self, batch: str) -> list[Sample] | None:
        try:
            samples = self._run.read_samples(batch)
        except (CorruptFile, FileNotFoundError) as error:
            if batch not in self.corrupt:
                log.error(event("shard skipped", run=self._run.name, batch=batch, error=error))
            self.corrupt.add(batch)
            return None
        self.corrupt.discard(batch)
        return samples

    def _read_again(self, batch: str) -> list[Sample]:
        """A shard that is in the journal, or that process 0 could read: without it all that follows would change."""
        try:
            return self._run.read_samples(batch)
        except (CorruptFile, FileNotFoundError) as error:
            raise TrainingError(
                f"shard {batch} of run {self._run.name} belongs to this training and cannot be read any more: {error} "
                f"Restore it, or have it done again with `draftfleet status --run {self._run.name} --repair` and a "
                "worker; then `draftfleet train` goes on."
            ) from None

    def _count_heldout(self, done: Sequence[str]) -> None:
        for batch in done:
            if split_of(batch) == "heldout" and not is_again(batch) and batch not in self._heldout:
                try:
                    self._heldout[batch] = self._run.counts(batch).rows
                except (CorruptFile, FileNotFoundError) as error:
                    self._heldout[batch] = 0
                    log.warning(event("held-out shard not counted", run=self._run.name, batch=batch, error=error))

    def _admit(self, shards: list[str]) -> None:
        """Take the turns of these shards, in the order of the list. One that was admitted before stays as it was."""
        samples = [sample for shard in shards for sample in self._fetched.pop(shard, None) or self._read_again(shard)]
        rows: list[Kept] = []
        found = [
            training_rows(sample, max_tokens=self._max_tokens, vocab_size=self._vocab_size)
            for sample in best(samples).values()
        ]
        for key, row in [one for turns in found for one in turns.items()]:
            if key in self._admitted:
                continue
            if isinstance(row, Kept):
                rows.append(row)
                self._admitted.add(key)
                self._refused.pop(key, None)
            else:
                self._refused[key] = row
        if shards:
            self.journal.admissions.append(shards)
            self._rows.append(rows)
            log.info(event("shards admitted", run=self._run.name, shards=len(shards), rows=len(rows)))

    def _replay(self, journal: Journal) -> None:
        for shards in journal.admissions:
            self._admit(shards)
        self.journal.complete = journal.complete
        if self.journal.complete and self._team.leads:  # nobody looks for new shards any more
            done = self._run.done()
            self._count_heldout(done)
            known = {shard for shards in journal.admissions for shard in shards}
            for batch in done:
                if split_of(batch) == "train" and batch not in known:
                    self._read(batch)

    def _refuse_if_empty(self) -> None:
        if not self._admitted:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.not_trained.items()) or "no samples"
            raise TrainingError(
                f"run {self._run.name} is complete and has no row to train on ({reasons}). Rows need exact token ids "
                "that match usage, the train split and the target's vocabulary: see `draftfleet status`."
            )
