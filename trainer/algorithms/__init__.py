"""How a drafter is trained and how it drafts: the protocol, and the table from name to module."""

# B batch, T tokens, D hidden size of the target, K chosen layers, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from threading import Event
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AutoConfig

from draftfleet.errors import SettingsError
from draftfleet.runs import Run
from draftfleet.settings import Settings
from trainer.algorithms.execution import Execution, settle
from trainer.drafter import DrafterConfig
from trainer.targets import Captured, Target, default_layers
from trainer.team import Team

ALGORITHMS = {"eagle3": "trainer.algorithms.eagle3", "dflash": "trainer.algorithms.dflash"}
"""Each module has `configure(settings, target) -> DrafterConfig` and `build(config, target) -> Algorithm`; one whose
drafter has more before its first step has `begin` too, and one that sees other layers than
`trainer.targets.default_layers` has `default_layers(num_layers) -> list[int]`. Beside it lies a module `forced`, with
`hits(algorithm, captured, k) -> Tensor`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum, so that gradient accumulation is exact in tokens: divide by the tokens of the whole step."""

    total: Tensor  # scalar, summed over tokens
    num_tokens: int  # with a loss; each of them has one at every draft step
    weight: float  # what `total` is divided by: `num_tokens`, or the sum of their weights
    metrics: dict[str, Tensor]
    """Sums by draft step: loss_0, accuracy_0, acceptance_0, ...; logged over `count_0`, ..., else over `num_tokens`."""


class Draft(NamedTuple):
    """Drafted tokens, and the logits (k, V) over the target's vocabulary that they were chosen from."""

    ids: list[int]
    logits: Tensor


Choose = Callable[[Tensor], Tensor]
"""Chooses a token from each row of logits: (n, V) -> (n,)."""


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


class Proposer(Protocol):
    """Drafting for one sequence, with a cache of its own."""

    def propose(self, ids: Tensor, hidden: Tensor, k: int, choose: Choose = greedy) -> Draft:
        """Draft at most `k` tokens, each chosen by `choose` from its logits.

        `hidden` (n, K*D) are the target's states that are new since the last call; `ids` (n,) are the tokens after
        each, so that the last is the token just chosen by the target. With prompt x0..x4 and first answer token x5 the
        first call gets the hidden states of positions 0..4 and ids [x1..x5].
        """
        ...


class Algorithm(Protocol):
    """Owns its batch layout, its loss, and how it drafts."""

    config: DrafterConfig
    drafter: nn.Module
    execution: Execution

    def collate(self, captured: list[Captured]) -> Any:
        """Pad captured rows into the layout that `loss` takes."""
        ...

    def loss(self, layout: Any) -> Loss: ...

    def proposer(self) -> Proposer: ...


def _module(name: str) -> Any:
    if name not in ALGORITHMS:
        raise SettingsError(f"trainer.algorithm = {name}: unknown; known are {', '.join(ALGORITHMS)}.")
    return import_module(ALGORITHMS[name])


def layers_seen(settings: Settings) -> list[int] | None:
    """Those that are set, else the algorithm's own. None if the target does not say how deep it is: it will say why."""
    if settings.trainer.layers is not None or not settings.target.path:
        return settings.trainer.layers
    try:
        config = AutoConfig.from_pretrained(settings.target.path).get_text_config()
    except (OSError, ValueError, KeyError):
        return None
    choose = getattr(_module(settings.trainer.algorithm), "default_layers", default_layers)
    return choose(config.num_hidden_layers)


def configure(settings: Settings, target: Target) -> DrafterConfig:
    """The shape of a new drafter for this target."""
    return _module(settings.trainer.algorithm).configure(settings, target)


def build(config: DrafterConfig, target: Target) -> Algorithm:
    """A drafter of this shape, freshly initialised from torch's generator."""
    return _module(config.algorithm).build(config, target)


def hits(algorithm: Algorithm, captured: Captured, k: int) -> Tensor:
    """Where the training code, fed the tokens that really came, drafts them: (T, at most k) bool, on the CPU.

    [t, i] is of the draft after token t, and its token i. There may be fewer than k: as many as were trained.
    """
    return import_module(f"{ALGORITHMS[algorithm.config.algorithm]}.forced").hits(algorithm, captured, k)


def begin(
    run: Run, settings: Settings, target: Target, team: Team, stop: Event, *, held: DrafterConfig | None = None
) -> Algorithm | None:
    """The drafter that the settings name, at its first step; `held` is what its checkpoint says it is, if it has one.

    None if asked to stop while it waited for samples. Every process of the team must call it.
    """
    module = _module(settings.trainer.algorithm)
    if hasattr(module, "begin"):
        algorithm = module.begin(run, settings, target, team, stop, held=held)
    else:
        algorithm = module.build(module.configure(settings, target), target)
    if algorithm is not None:
        settle(settings.trainer, algorithm, target)
    return algorithm
