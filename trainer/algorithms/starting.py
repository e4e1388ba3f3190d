"""A drafter that training starts from: one of a run, a folder of this trainer, or one that an engine reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from draftfleet import drafters
from draftfleet.errors import DrafterError, SettingsError, TargetError
from draftfleet.logs import event
from draftfleet.names import NAME
from draftfleet.runs import Run
from trainer import best, checkpoint
from trainer.drafter import DrafterConfig
from trainer.export import importing
from trainer.export.importing import Imported
from trainer.targets import Target
from trainer.team import Team

log = logging.getLogger(__name__)

RUN = "run:"
"""`run:RUN/DRAFTER` is a drafter of a run in the storage, wherever that is; anything else is a folder of this node."""

WITHOUT_KNOB = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
)
"""What a drafter was built with and no knob says: it stays as it is."""

ROUNDING = 2**-7
"""Of numbers that went through bfloat16, which keeps 8 bits, relative to the largest of a matrix."""


@dataclass(frozen=True, slots=True)
class Source:
    """`start_from`, as it was set."""

    knob: str
    value: str

    def __str__(self) -> str:
        return f"{self.knob} = {self.value}"


def load(source: Source, run: Run, team: Team) -> Imported:
    """The drafter that is named. Of one with checkpoints it is the best, or the newest if none was measured.

    Raises DrafterError or RunMissing. Every process of the team must call it.
    """
    folder = _of_run(source, run, team) if source.value.startswith(RUN) else _of_folder(source)
    log.info(event("starting from another drafter", folder=folder))
    return importing.read(folder)


def _of_run(source: Source, run: Run, team: Team) -> Path:
    name, _, drafter = source.value.removeprefix(RUN).partition("/")
    if not re.fullmatch(NAME, name) or not re.fullmatch(NAME, drafter):
        raise DrafterError(f"{source}: name a run and its drafter, as in run:first/eagle3.")
    other = Run.open(run.storage, name)
    return Path(team.share(str(_chosen(source, other, drafter)) if team.leads else None))


def _chosen(source: Source, run: Run, drafter: str) -> Path:
    try:
        return best.choose(run, drafter)
    except DrafterError:
        there = ", ".join(drafters.names(run)) or "none"
        raise DrafterError(
            f"{source}: run {run.name} has no checkpoint of a drafter {drafter}; its drafters are {there}. Name one "
            "that is trained, or wait until this one is."
        ) from None


def _of_folder(source: Source) -> Path:
    folder = Path(source.value)
    if not folder.is_dir():
        raise DrafterError(
            f"{source}: there is no such folder on this machine. A drafter of a run in the storage is named as in "
            "run:first/eagle3."
        )
    return best.spared(folder) or checkpoint.latest(folder) or folder


def of_the_shape_of(
    start: DrafterConfig, own: DrafterConfig, source: Source, knobs: Mapping[str, str]
) -> DrafterConfig:
    """`own`, with the shape of `start` that no knob says. `knobs`, by field, must say what the drafter has.

    Raises TargetError where `start` is of another target, SettingsError where the settings say another drafter.
    """
    if start.algorithm != own.algorithm:
        raise SettingsError(
            f"{source} holds a drafter of {start.algorithm}, and trainer.algorithm = {own.algorithm}: name one of "
            f"{own.algorithm}, or set trainer.algorithm = {start.algorithm}."
        )
    of_target = {
        "hidden_size": own.target_hidden_size,
        "target_hidden_size": own.target_hidden_size,
        "vocab_size": own.vocab_size,
        "num_target_layers": own.num_target_layers if start.num_target_layers else 0,  # engines' folders do not say it
    }
    others = [
        f"{name} {getattr(start, name)}, not {value}"
        for name, value in of_target.items()
        if getattr(start, name) != value
    ]
    if others:
        raise TargetError(
            f"{source} holds a drafter of another target than target.path = {own.target}: {'; '.join(others)}."
        )
    wrong = [
        f"  {knob} = {_said(getattr(own, name))}: the drafter has {_said(getattr(start, name))}"
        for name, knob in knobs.items()
        if getattr(own, name) != getattr(start, name)
    ]
    if wrong:
        raise SettingsError(
            f"{source} holds a drafter that these settings do not describe:\n"
            + "\n".join(wrong)
            + "\nSet them to what the drafter has, or name another drafter."
        )
    return replace(own, **{name: getattr(start, name) for name in WITHOUT_KNOB})


def expect_embedding(embedding: Tensor | None, target: Target, source: Source) -> None:
    """Raises TargetError if a folder's embedding is not the target's."""
    if embedding is not None and not alike(embedding, target.embedding):
        raise TargetError(
            f"{source} has an embedding of its own, which is not the target's: it is the drafter of another target, or "
            "one that was trained with its embedding, which draftfleet does not do."
        )


def expect_weights(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: Source) -> None:
    """Raises DrafterError, naming each tensor that is missing, unknown or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in given]
    problems += [f"{name} is unknown" for name in sorted(given.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(given[name].shape)}, it must be {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    ]
    if problems:
        raise DrafterError(
            f"{source} does not hold the weights that its configuration describes:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )


def alike(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    other = other.float()
    return bool((tensor.to(other.device).float() - other).abs().max() <= ROUNDING * other.abs().max())


def _said(value: object) -> str:
    return "(unset)" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
