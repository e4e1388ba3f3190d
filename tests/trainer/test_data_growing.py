"""A set that grows while it is trained on: whatever happens, each epoch has each of its rows once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from draftfleet.runs import Run
from draftfleet.settings import Trainer
from trainer.data import START, Feed, Journal, Step
from trainer.team import Team

VOCAB = 32
EPOCHS = 3


class Leading(Team):
    """Process 0, with a note of all that it told the others."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.told: list[Any] = []

    def share(self, value: Any) -> Any:
        self.told.append(value)
        return value


class Following(Team):
    """Another process: it knows what process 0 told it, and nothing else."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__(1, 1)
        self._told = iter(told)

    def share(self, value: Any) -> Any:
        assert value is None
        return next(self._told)


def events(run: Run, samples: Any, dice: random.Random) -> tuple[Iterator[Callable[[], object]], list[str]]:
    """What happens to the run, one thing at a time, and the keys that are trained on in the end."""
    happens: list[Callable[[], object]] = []
    kept: list[str] = []
    for number in range(dice.randrange(3, 9)):
        batch, num_rows = f"train-{number:06d}", dice.randrange(1, 12)
        keys = [f"{batch}-row{row}" for row in range(num_rows)]
        made = [samples.make(batch, key) for key in keys]
        samples.prompts(batch, num_rows)
        kind = dice.choice(["whole", "whole", "whole", "torn", "mended"])
        if kind != "whole":
            happens.append(lambda batch=batch: samples.corrupt(batch))
        if kind == "mended":
            happens.append(lambda batch=batch: run.set_aside(batch))
        if kind != "torn":
            happens.append(lambda batch=batch, made=made: run.commit(batch, made))
            kept += keys
    happens.append(lambda: samples.put("heldout-000000", 2))

    def in_turns() -> Iterator[Callable[[], object]]:
        at = 0
        while at < len(happens):
            together = dice.randrange(1, 4)  # several things may happen between two looks
            yield lambda now=happens[at : at + together]: [one() for one in now]
            at += together
        yield lambda: run.seal({})

    return in_turns(), kept


@pytest.mark.parametrize("seed", range(25))
def test_every_row_comes_once_in_each_epoch_wherever_the_training_was_cut_off(
    run: Run, knobs: Trainer, samples: Any, seed: int
) -> None:
    dice = random.Random(seed)
    happening, kept = events(run, samples, dice)
    if not kept:
        kept = samples.put("train-000100", 5)
    num_batches = dice.randrange(1, 4)
    knobs = knobs.model_copy(update={"poll_s": 0.001, "seed": seed})
    seen: list[Step] = []
    journal, position = Journal(), START

    while not seen or seen[-1].then.epoch < EPOCHS:
        leading = Leading()
        leader = Feed(run, knobs, VOCAB, leading, journal=journal, on_wait=lambda _: next(happening, lambda: None)())
        follower = Feed(run, knobs, VOCAB, Following(leading.told), journal=journal)
        mine, theirs = leader.steps(position, num_batches), follower.steps(position, num_batches)
        drawn: list[tuple[Step, Journal]] = []
        for step in mine:
            other = next(theirs)
            assert keys(other) == keys(step)
            assert other.then == step.then
            drawn.append((step, leader.journal_now()))
            if dice.random() < 0.15 or step.then.epoch >= EPOCHS:
                break
        # Steps that were drawn ahead of the checkpoint come again; its journal may know more than its position.
        trained = dice.randrange(1, len(drawn) + 1)
        seen += [step for step, _ in drawn[:trained]]
        position = seen[-1].then
        known = dice.choice([one for _, one in drawn[trained - 1 :]])
        journal = Journal.from_json(json.loads(json.dumps(known.to_json())))

    counts = [Counter[str]() for _ in range(EPOCHS + 1)]
    for step in seen:
        for batch, epoch in zip(step.batches, step.epochs, strict=True):
            counts[min(epoch, EPOCHS)].update(row.key for row in batch)
    assert counts[:EPOCHS] == [Counter(kept)] * EPOCHS


def keys(step: Step) -> list[list[str]]:
    return [[row.key for row in batch] for batch in step.batches]
