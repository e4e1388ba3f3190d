"""How a drafter computes, as opposed to what: by which kernel, what is kept for the backward pass, what is compiled.

Nothing here changes a drafter but for rounding, so none of it is pinned. What a device cannot do is left out, with a
warning that says why: it is tried on two small batches of random states before training begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from draftfleet.logs import event
from draftfleet.settings import Trainer
from trainer.algorithms import flex
from trainer.devices import choose_dtype
from trainer.targets import Captured, Row, Target

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TRIED_TOKENS = (40, 150)
"""Of the rows that a way to compute is tried on: two lengths, so that what is compiled for one alone shows."""


@dataclass(frozen=True, slots=True)
class Execution:
    flex: bool = False
    """Flex attention in place of the eager form."""
    recomputes: bool = False
    """Activation checkpointing: what is within a layer is computed again in the backward pass, not kept."""

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a layer."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


PLAIN = Execution()


def settle(knobs: Trainer, algorithm: Any, target: Target) -> None:
    """Have an algorithm compute as the settings ask, as far as its device can."""
    device, dtype = target.device, choose_dtype(knobs.dtype, target.device)
    algorithm.execution = replace(PLAIN, recomputes=knobs.activation_checkpointing)
    if _is_wanted(knobs.attention, "flex", device):
        fault = flex.unusable(device, algorithm.config.head_dim)
        if fault is None:
            algorithm.execution = replace(algorithm.execution, flex=True)
            fault = _fault(algorithm, target, dtype)
        if fault is not None:
            algorithm.execution = replace(algorithm.execution, flex=False)
            log.warning(event("flex attention left out", instead="eager", reason=fault))
    is_compiled = _is_wanted(knobs.compile, "on", device)
    if is_compiled:
        compile_layers(algorithm.drafter)
        fault = _fault(algorithm, target, dtype)
        if fault is not None:
            is_compiled = False
            leave_uncompiled(algorithm.drafter)
            log.warning(event("torch.compile left out", reason=fault))
    log.info(
        event(
            "drafter computes",
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            attention="flex" if algorithm.execution.flex else "eager",
            compiled=is_compiled,
            activation_checkpointing=algorithm.execution.recomputes,
        )
    )


def compile_layers(drafter: nn.Module, **options: Any) -> None:
    """Compile what the modules of a drafter name in `COMPILED`: what lies between two attentions, for every length."""
    for module in drafter.modules():
        for name in getattr(module, "COMPILED", ()):
            setattr(module, name, torch.compile(getattr(module, name), dynamic=True, fullgraph=True, **options))


def leave_uncompiled(drafter: nn.Module) -> None:
    for module in drafter.modules():
        for name in getattr(module, "COMPILED", ()):
            vars(module).pop(name, None)


def _is_wanted(knob: str, name: str, device: torch.device) -> bool:
    return knob == name or (knob == "auto" and device.type == "cuda")


def _fault(algorithm: Any, target: Target, dtype: torch.dtype) -> str | None:
    """What goes wrong in a forward and a backward pass over random states; None if nothing does."""
    try:
        for length in TRIED_TOKENS:
            rows = [_random(algorithm, target, length, number) for number in range(2)]
            with torch.autocast(target.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = algorithm.loss(algorithm.collate(rows))
            loss.total.backward()
            if not torch.isfinite(loss.total):
                return f"the loss of random states is {float(loss.total.detach())}"
    except Exception as error:  # a compiler fails in as many ways as it has parts
        return _said(error)
    finally:
        algorithm.drafter.zero_grad()
    return None


def _random(algorithm: Any, target: Target, length: int, number: int) -> Captured:
    """A row of an answer after a short prompt, without the token that stands in DFlash's masked slots."""
    config, dice = algorithm.config, torch.Generator().manual_seed(length + number)
    ids = torch.randint(0, config.vocab_size - 1, (length,), generator=dice)
    ids[ids == config.mask_token_id] = config.vocab_size - 1
    mask = torch.arange(length) >= length // 4
    width = config.target_hidden_size
    hidden = torch.randn(length, len(config.layers) * width, generator=dice)
    last = torch.randn(length, width, generator=dice)
    dtype = target.embedding.dtype
    return Captured(
        Row(f"tried-{length}-{number}", ids, mask), *(part.to(target.device, dtype) for part in (hidden, last))
    )


def _said(error: BaseException) -> str:
    """Its kind and the first line of what it says; of one that wraps another, those of the innermost."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {said}"
