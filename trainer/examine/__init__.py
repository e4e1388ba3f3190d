"""Whether the hidden states that a drafter would be trained on are the right ones: `draftfleet doctor --check-target`.

Acceptance does not show a wrong layer, so it is looked at in numbers, before training: what the target captures against
the plain model of its folder, which no hook listens to, and the ids of the run against what that model would say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from draftfleet.errors import DraftfleetError, RunMissing
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from trainer import algorithms, targets
from trainer.devices import choose_device
from trainer.examine import samples, states
from trainer.examine.finding import Found
from trainer.examine.reference import Reference
from trainer.targets import Row, checked_layers


def look(settings: Settings) -> Iterator[dict[str, Any]]:
    """Findings, as the keyword arguments of the doctor's own. Raises DraftfleetError where nothing can be looked at."""
    for one in _look(settings):
        yield one._asdict()


def _look(settings: Settings) -> Iterator[Found]:
    device = choose_device(settings.trainer.device)
    # The plain model is asked first and let go: two at once may not fit.
    reference = Reference.load(settings, device)
    layers = checked_layers(algorithms.layers_seen(settings), reference.num_layers)
    yield Found("ok", "weights", reference.said, values={"layers": layers})
    rows, run = _rows(settings, reference.vocab_size)
    if run is None:
        why = "the run has no row to train on yet: states are compared on random ids"
        yield Found("skipped", "samples", why)
        rows = states.random_rows(reference.vocab_size)
    else:
        yield from samples.compare(reference, rows, run)
    few = states.few(rows)
    expected = [reference.states(row.ids) for row in few]
    reference.let_go()

    try:
        target = targets.load(settings, layers, device)
        captured = [one for batch in target.capture([few]) for one in batch]
    except DraftfleetError as error:
        yield Found("fault", "capture", str(error), f"trainer.target = {settings.trainer.target} must be able to work")
        return
    is_exact = target.embedding.dtype == torch.float32 and settings.trainer.target != "cache"
    yield from states.compare(
        target, reference, captured, asked=few, layers=layers, expected=expected, is_exact=is_exact
    )


def _rows(settings: Settings, vocab_size: int) -> tuple[list[Row], Run | None]:
    try:
        run = Run.open(open_storage(settings.storage), settings.run)
    except RunMissing:
        return [], None
    rows = samples.rows_of_run(run, settings, vocab_size)
    return rows, run if rows else None
