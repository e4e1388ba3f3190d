"""What an EAGLE-3 drafter has before its first step: a vocabulary that was counted, weights of another drafter."""

from __future__ import annotations

import logging
from threading import Event

import torch

from draftfleet.errors import DrafterError
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings
from trainer import vocabulary
from trainer.algorithms import starting
from trainer.algorithms.eagle3.configuration import configure
from trainer.algorithms.eagle3.training import Eagle3, build
from trainer.algorithms.starting import Source
from trainer.drafter import DrafterConfig
from trainer.export.importing import Imported
from trainer.progress import Progress
from trainer.targets import Target
from trainer.team import Team

log = logging.getLogger(__name__)


def begin(
    run: Run, settings: Settings, target: Target, team: Team, stop: Event, *, held: DrafterConfig | None = None
) -> Eagle3 | None:
    """The drafter at its first step, or, where `held` is what its checkpoint says it is, ready for that one's weights.

    None if asked to stop while it waited for samples. Raises DrafterError, SettingsError, TargetError or TrainingError.
    """
    source = Source("eagle3.start_from", settings.eagle3.start_from)
    is_new = not source.value
    if held is not None:  # the drafter that it began from may be gone
        return build(configure(settings, target, None if is_new else held), target)
    found = None if is_new else starting.load(source, run, team)
    algorithm = build(configure(settings, target, found.config if found else None), target)
    if found:
        take_weights(algorithm, found, target, source)
    ids = algorithm.drafter.draft_ids()
    if ids is None:
        return algorithm
    settled = vocabulary.settle(
        run, settings, len(target.embedding), team, stop,
        given=None if is_new else ids.tolist(), on_wait=lambda rows: _waiting(run, settings, rows),
    )  # fmt: skip
    if settled is None:
        return None
    if is_new:
        algorithm.drafter.take_vocabulary(torch.tensor(settled.ids), target)
    return algorithm


def take_weights(algorithm: Eagle3, found: Imported, target: Target, source: Source) -> None:
    """Load another drafter's weights. What its format may leave out is the target's, or follows from the rest.

    Raises DrafterError where they do not fit, TargetError where they are for another target.
    """
    given = dict(found.tensors)
    starting.expect_embedding(found.embedding, target, source)
    expected = algorithm.drafter.state_dict()
    if algorithm.drafter.is_reduced and "d2t" in given and "t2d" not in given:  # engines do not need it
        given["t2d"] = torch.zeros(len(expected["t2d"]), dtype=torch.bool)
        given["t2d"][given["d2t"].long() + torch.arange(len(given["d2t"]))] = True
    if not algorithm.drafter.is_reduced:
        given = {name: tensor for name, tensor in given.items() if name not in {"d2t", "t2d"}}
        given.setdefault("lm_head.weight", target.head)
    starting.expect_weights(given, expected, source)
    algorithm.drafter.load_state_dict(given)
    ids = algorithm.drafter.draft_ids()
    rows = target.head if ids is None else target.head[ids.to(target.head.device)]
    if algorithm.config.head == "frozen" and not starting.alike(given["lm_head.weight"], rows):
        raise DrafterError(f"{source} has a head of its own, which is not the target's: set eagle3.head = own.")


def _waiting(run: Run, settings: Settings, rows: int) -> None:
    """Say that training has not begun, since there are too few rows to count a vocabulary on."""
    before = Progress.read(run, settings.trainer.drafter)
    if before is None or before.rows_admitted != rows or not before.waiting:
        log.info(event("waiting for a vocabulary", run=run.name, rows=rows, of=settings.eagle3.vocab_rows))
        waiting = Progress(step=0, max_steps=settings.trainer.max_steps, rows_admitted=rows, waiting=True)
        waiting.write(run, settings.trainer.drafter)
