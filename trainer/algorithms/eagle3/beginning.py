"""What an EAGLE-3 drafter has before its first step: a vocabulary that was counted, weights of another drafter."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from draftfleet.errors import DrafterError, TargetError
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings
from trainer import vocabulary
from trainer.algorithms.eagle3 import starting
from trainer.algorithms.eagle3.configuration import configure
from trainer.algorithms.eagle3.training import Eagle3, build
from trainer.drafter import DrafterConfig
from trainer.progress import Progress
from trainer.targets import Target
from trainer.team import Team

log = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"

ROUNDING = 2**-7
"""Of numbers that went through bfloat16, which keeps 8 bits, relative to the largest of a matrix."""


def begin(
    run: Run, settings: Settings, target: Target, team: Team, stop: Event, *, held: DrafterConfig | None = None
) -> Eagle3 | None:
    """The drafter at its first step, or, where `held` is what its checkpoint says it is, ready for that one's weights.

    None if asked to stop while it waited for samples. Raises DrafterError, SettingsError, TargetError or TrainingError.
    """
    folder = settings.eagle3.start_from
    if held is not None:  # the folder that it began from may be gone
        return build(configure(settings, target, held if folder else None), target)
    start, tensors = starting.load(Path(folder)) if folder else (None, {})
    algorithm = build(configure(settings, target, start), target)
    if folder:
        take_weights(algorithm, tensors, target, folder)
        log.info(event("drafter started from another", folder=folder))
    ids = algorithm.drafter.draft_ids()
    if ids is None:
        return algorithm
    settled = vocabulary.settle(
        run, settings, len(target.embedding), team, stop,
        given=ids.tolist() if folder else None, on_wait=lambda rows: _waiting(run, settings, rows),
    )  # fmt: skip
    if settled is None:
        return None
    if not folder:
        algorithm.drafter.take_vocabulary(torch.tensor(settled.ids), target)
    return algorithm


def take_weights(algorithm: Eagle3, tensors: dict[str, Tensor], target: Target, folder: str) -> None:
    """Load another drafter's weights. What its format may leave out is the target's, or follows from the rest.

    Raises DrafterError where they do not fit, TargetError where they are for another target.
    """
    given = dict(tensors)
    embedding = given.pop(EMBEDDING, None)
    if embedding is not None and not _alike(embedding, target.embedding):
        raise TargetError(
            f"eagle3.start_from = {folder} has an embedding of its own, which is not the target's: it is the drafter "
            "of another target, or one that was trained with its embedding, which draftfleet does not do."
        )
    expected = algorithm.drafter.state_dict()
    if algorithm.drafter.is_reduced and "d2t" in given and "t2d" not in given:  # engines do not need it
        given["t2d"] = torch.zeros(len(expected["t2d"]), dtype=torch.bool)
        given["t2d"][given["d2t"].long() + torch.arange(len(given["d2t"]))] = True
    if not algorithm.drafter.is_reduced:
        given = {name: tensor for name, tensor in given.items() if name not in {"d2t", "t2d"}}
        given.setdefault("lm_head.weight", target.head)
    problems = [f"{name} is missing" for name in expected if name not in given]
    problems += [f"{name} is unknown" for name in sorted(given.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(given[name].shape)}, it must be {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    ]
    if problems:
        raise DrafterError(
            f"eagle3.start_from = {folder} does not hold the weights that its configuration describes:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )
    algorithm.drafter.load_state_dict(given)
    ids = algorithm.drafter.draft_ids()
    rows = target.head if ids is None else target.head[ids.to(target.head.device)]
    if algorithm.config.head == "frozen" and not _alike(given["lm_head.weight"], rows):
        raise DrafterError(
            f"eagle3.start_from = {folder} has a head of its own, which is not the target's: set eagle3.head = own."
        )


def _alike(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    other = other.float()
    return bool((tensor.to(other.device).float() - other).abs().max() <= ROUNDING * other.abs().max())


def _waiting(run: Run, settings: Settings, rows: int) -> None:
    """Say that training has not begun, since there are too few rows to count a vocabulary on."""
    before = Progress.read(run, settings.trainer.drafter)
    if before is None or before.rows_admitted != rows or not before.waiting:
        log.info(event("waiting for a vocabulary", run=run.name, rows=rows, of=settings.eagle3.vocab_rows))
        waiting = Progress(step=0, max_steps=settings.trainer.max_steps, rows_admitted=rows, waiting=True)
        waiting.write(run, settings.trainer.drafter)
