"""The side of a trainer in the race: it takes orders by lines of JSON, so that two trainers can take turns.

    {"steps": 10}      ->  {"steps": 10, "tokens": 5012, "wall_s": .., "cpu_s": .., "loss": ..}
    {"save": "DIR"}    ->  {"saved": "DIR"}
    {"profile": 5}     ->  {"attention": .., ..}     milliseconds of a step: parts/race_profile.py
    {"memory": true}   ->  {"peak_bytes": ..}     the highest since training began, above what was resident then

A step is forward, backward, clipping and the optimizer. Reading rows is not in it, nor is packing them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from parts.memory import forget_peak, peak_bytes, resident_bytes
from parts.race_order import Order
from parts.race_profile import CLASSES, by_class
from parts.race_rows import Example, Rows, num_tokens


class Trainer(Protocol):
    vocab_size: int

    def pack(self, examples: list[Example]) -> Any:
        """What a data loader does, in processes beside the training."""
        ...

    def step(self, batch: Any) -> float:
        """Returns the loss."""
        ...

    def save(self, folder: Path) -> None: ...


def read_order() -> Order:
    torch.set_num_threads(1)
    return Order(**json.loads(sys.argv[1]))


def serve(order: Order, trainer: Trainer) -> None:
    """Until the orders end."""
    batches = _batches(Rows(Path(order.rows)), order)
    before = resident_bytes()
    forget_peak()
    _say({"ready": True, "resident_bytes": before})
    for line in sys.stdin:
        asked = json.loads(line)
        if "steps" in asked:
            _say(_steps(trainer, batches, asked["steps"]))
        elif "save" in asked:
            trainer.save(Path(asked["save"]))
            _say({"saved": asked["save"]})
        elif "profile" in asked:
            _say(_profile(trainer, batches, asked["profile"], order.batch_tokens))
        elif "memory" in asked:
            _say({"peak_bytes": peak_bytes() - before})


def _batches(rows: Rows, order: Order) -> Iterator[list[Example]]:
    for epoch, numbers in rows.batches(order.seed, order.batch_tokens):
        yield [rows.example(number, epoch) for number in numbers]


def _steps(trainer: Trainer, batches: Iterator[list[Example]], count: int) -> dict[str, float]:
    tokens, wall_s, cpu_s, loss = 0, 0.0, 0.0, 0.0
    for _ in range(count):
        examples = next(batches)
        batch = trainer.pack(examples)
        wall, cpu = time.perf_counter(), time.process_time()
        loss += trainer.step(batch)
        wall_s += time.perf_counter() - wall
        cpu_s += time.process_time() - cpu
        tokens += num_tokens(examples)
    return {"steps": count, "tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s, "loss": loss / count}


def _profile(trainer: Trainer, batches: Iterator[list[Example]], count: int, batch_tokens: int) -> dict[str, float]:
    """The mean over these steps."""
    sums = Counter[str]()
    for _ in range(count):
        batch = trainer.pack(next(batches))
        sums.update(by_class(lambda batch=batch: trainer.step(batch), trainer.vocab_size, batch_tokens))
    return {name: sums[name] / count for name in CLASSES}


def _say(answer: dict[str, Any]) -> None:
    os.write(_OUT, (json.dumps(answer) + "\n").encode())


# What libraries print must not come among the answers.
_OUT = os.dup(1)
os.dup2(2, 1)
