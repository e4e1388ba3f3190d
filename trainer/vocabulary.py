"""A drafter's own vocabulary: the tokens that completions of the run have most often.

Counted on the rows that are trained on, their completions alone, as soon as there are `eagle3.vocab_rows` of them or no
more will come; written beside the drafter, so that every start of its training has the same one. What it leaves out the
drafter never proposes: its coverage, the share of the counted tokens that it holds, caps acceptance.

    RUN/drafters/NAME/vocabulary.json    what it was counted for, rows, tokens, coverage, ids
"""

# V vocabulary of the target

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple, Self

import torch

from draftfleet import drafters
from draftfleet.errors import CorruptFile, TrainingError
from draftfleet.logs import event
from draftfleet.names import split_of
from draftfleet.outcomes import best
from draftfleet.runs import Run
from draftfleet.settings import Settings
from trainer.data import Kept, is_finished, training_rows
from trainer.team import Team

log = logging.getLogger(__name__)

FILE = "vocabulary.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`ids` ascend. `covered` of the `tokens` that were counted, in `rows`, are among them."""

    ids: list[int]
    rows: int
    tokens: int
    covered: int

    @property
    def coverage(self) -> float:
        return self.covered / max(self.tokens, 1)

    def to_json(self, key: dict[str, Any]) -> str:
        counted = {"rows": self.rows, "tokens": self.tokens, "covered": self.covered, "coverage": self.coverage}
        return json.dumps({"of": key, **counted, "ids": self.ids}) + "\n"

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(value["ids"], value["rows"], value["tokens"], value["covered"])


class Counted:
    """The completion tokens of a run's rows, shard by shard."""

    def __init__(self, run: Run, settings: Settings, vocab_size: int) -> None:
        self.rows = 0
        self.vocab_size = vocab_size
        self.run = run
        self._max_tokens = min(settings.trainer.max_length, settings.trainer.batch_tokens)
        self._tokens = torch.zeros(vocab_size, dtype=torch.int64)
        self._shards: set[str] = set()
        self._keys: set[str] = set()

    def look(self, enough: int) -> bool:
        """Count shards that are new, in their order, until there are rows enough. False while more are awaited."""
        # Asked before the listing, so that a run found finished has no shard that the listing lacks.
        finished = is_finished(self.run)
        for batch in sorted(self.run.done()):
            if self.rows >= enough:
                break
            if split_of(batch) == "train" and batch not in self._shards:
                self._count(batch)
        return finished or self.rows >= enough

    def _count(self, batch: str) -> None:
        self._shards.add(batch)
        try:
            samples = self.run.read_samples(batch)
        except (CorruptFile, FileNotFoundError) as error:
            log.error(event("shard not counted", run=self.run.name, batch=batch, error=error))
            return
        for sample in best(samples).values():
            turns = training_rows(sample, max_tokens=self._max_tokens, vocab_size=self.vocab_size)
            for key, row in turns.items():
                if isinstance(row, Kept) and key not in self._keys:
                    self._keys.add(key)
                    self.rows += 1
                    self._tokens += torch.bincount(row.ids[row.num_prompt_tokens :], minlength=self.vocab_size)

    def most_frequent(self, size: int) -> list[int]:
        """Ascending. Of tokens that are equally frequent, and of those that never occur, the lowest ids."""
        return self._tokens.sort(descending=True, stable=True).indices[:size].sort().values.tolist()

    def vocabulary(self, ids: Iterable[int]) -> Vocabulary:
        kept = list(ids)
        return Vocabulary(kept, self.rows, int(self._tokens.sum()), int(self._tokens[kept].sum()))


class _Look(NamedTuple):
    """What process 0 found; neither while it waits."""

    vocabulary: Vocabulary | None
    stop: bool


def settle(
    run: Run,
    settings: Settings,
    vocab_size: int,
    team: Team,
    stop: Event,
    *,
    given: list[int] | None = None,
    on_wait: Callable[[int], None] = lambda _: None,
) -> Vocabulary | None:
    """The vocabulary of the drafter that the settings name; None if asked to stop before it could be counted.

    `given` ids are not chosen but only counted, in what is there. `on_wait` is told the rows so far. Every process of
    the team must call it. Raises TrainingError if the run is complete and has nothing to count.
    """
    counted = Counted(run, settings, vocab_size)
    held = _read(run, settings, vocab_size) if team.leads else None
    if held is not None and given not in (None, held.ids):
        held = None
    while True:
        look = team.share(_look(counted, settings, stop, held=held, given=given) if team.leads else None)
        if look.vocabulary is not None or look.stop:
            return look.vocabulary
        if team.leads:
            on_wait(counted.rows)
        stop.wait(settings.trainer.poll_s)


def _look(
    counted: Counted, settings: Settings, stop: Event, *, held: Vocabulary | None, given: list[int] | None
) -> _Look:
    if held is not None:
        return _Look(held, stop=False)
    if stop.is_set():
        return _Look(None, stop=True)
    enough = counted.look(settings.eagle3.vocab_rows)
    if given is not None:
        found = counted.vocabulary(given)
    elif not enough:
        return _Look(None, stop=False)
    elif counted.rows == 0:
        raise TrainingError(
            f"run {counted.run.name} is complete and has no row to count a draft vocabulary on: rows need exact token "
            "ids that match usage, the train split and the target's vocabulary. See `draftfleet status`."
        )
    else:
        found = counted.vocabulary(counted.most_frequent(settings.eagle3.draft_vocab_size or counted.vocab_size))
    if found.rows:
        _write(counted.run, settings, counted.vocab_size, found)
    return _Look(found, stop=False)


def coverage(run: Run, drafter: str) -> float | None:
    """Of the drafter's own vocabulary; None if it has the target's whole one."""
    stored = drafters.read(run, drafter, FILE)
    return None if stored is None else float(stored["coverage"])


def _key(run: Run, settings: Settings, vocab_size: int) -> dict[str, Any]:
    """What a vocabulary is counted for: with any of it changed, it is another one."""
    return {
        "run_id": run.run_id,
        "tokenizer": run.info.content.get("target.fingerprint"),
        "vocab_size": vocab_size,
        "draft_vocab_size": settings.eagle3.draft_vocab_size,
        "vocab_rows": settings.eagle3.vocab_rows,
    }


def _read(run: Run, settings: Settings, vocab_size: int) -> Vocabulary | None:
    """The one that was written, if it was counted for the same."""
    stored, key = drafters.read(run, settings.trainer.drafter, FILE), _key(run, settings, vocab_size)
    if stored is None:
        return None
    if stored.get("of") != key:
        log.warning(event("vocabulary is counted anew", run=run.name, had=stored.get("of"), now=key))
        return None
    return Vocabulary.from_json(stored)


def _write(run: Run, settings: Settings, vocab_size: int, found: Vocabulary) -> None:
    text = found.to_json(_key(run, settings, vocab_size))
    run.storage.put(f"{run.name}/drafters/{settings.trainer.drafter}/{FILE}", text.encode())
    log.info(
        event(
            "vocabulary counted",
            run=run.name,
            drafter=settings.trainer.drafter,
            ids=len(found.ids),
            of=vocab_size,
            rows=found.rows,
            tokens=found.tokens,
            coverage=found.coverage,
        )
    )
