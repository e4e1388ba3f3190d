"""DFlash: a block of tokens drafted in one forward pass (arXiv 2602.06036).

A block is the token that the target chose last, the anchor, and masked slots after it; slot k drafts the token k after
the anchor. Every layer sees the target's states of all positions before the anchor, and the block itself. The state at
the anchor is not seen: in serving the target has yet to process that token. Docs: docs/dflash.md.

    anchors.py     where blocks begin; the layout of a batch
    model.py       the network                              attention.py   its attention, without a mask of T x T
    loss.py        weighted cross-entropy, slice by slice   proposer.py    drafting
    mask_token.py  which token stands in a masked slot      starting.py    from another drafter's weights

What was built on DFlash since shares anchors, layout and attention, and would stand here:

    DFlash2   convolutions over the slots: in `model.DecoderLayer`, before and after attention and SwiGLU, on (N, B, H),
              where blocks are apart already; its candidate selector: after `Drafter.norm`, a module beside it in
              `model.Drafter`, with a loss of its own from the states that `loss.block_cross_entropy` takes and the
              labels of `Layout` shifted by a slot; `proposer` then chooses slot by slot
    DSpark    its Markov bias and confidence head: likewise after `Drafter.norm`; its L1 term needs the target's
              distribution, which is `Captured.last` at the positions before the labels, kept by `anchors.lay_out`
"""

from __future__ import annotations

from threading import Event

import torch
from torch import nn

from draftfleet.errors import SettingsError
from draftfleet.runs import Run
from draftfleet.settings import DFlash as Knobs
from draftfleet.settings import Settings
from trainer.algorithms.dflash import mask_token, starting
from trainer.algorithms.dflash.algorithm import DFlash
from trainer.algorithms.dflash.loss import gamma_for
from trainer.algorithms.shape import of_target
from trainer.algorithms.starting import Source, load
from trainer.drafter import DrafterConfig
from trainer.targets import Target
from trainer.team import Team

NUM_LAYERS_SEEN = 5
START_FROM = "dflash.start_from"


def default_layers(num_layers: int) -> list[int]:
    """Five, evenly from the second to the third last: [1, 16, 31, 46, 61] of 64. Fewer in a shallow target."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, 0)
    steps = NUM_LAYERS_SEEN - 1
    return sorted({round(first + (last - first) * step / steps) for step in range(NUM_LAYERS_SEEN)})


def configure(settings: Settings, target: Target, start: DrafterConfig | None = None) -> DrafterConfig:
    """A drafter as wide as the target, with its heads, its feed-forward size, its positions and its vocabulary; or of
    the shape of `start`, which must be of this target and of these settings.

    Raises SettingsError or TargetError.
    """
    knobs = settings.dflash
    mask = start.mask_token_id if start is not None and knobs.mask_token_id is None else knobs.mask_token_id
    own = DrafterConfig(
        algorithm="dflash",
        **of_target(settings, target),
        style="qwen3",
        num_layers=knobs.num_layers,
        block_size=knobs.block_size,
        mask_token_id=mask_token.choose(mask, settings.target.path, target.embedding),
        layer_types=_layer_types(knobs),
        sliding_window=knobs.sliding_window,
        causal=knobs.causal,
        anchors=knobs.anchors,
        anchor_share=knobs.anchor_share,
        soft_labels=knobs.labels == "soft",
        slot_weights=knobs.weights,
        slot_decay=knobs.gamma or gamma_for(knobs.block_size),
        dpace_alpha=knobs.alpha,
    )
    return own if start is None else starting.shaped(start, own, Source(START_FROM, knobs.start_from))


def begin(
    run: Run, settings: Settings, target: Target, team: Team, stop: Event, *, held: DrafterConfig | None = None
) -> DFlash:
    """The drafter at its first step, or, where `held` is what its checkpoint says it is, ready for that one's weights.

    Raises DrafterError, SettingsError or TargetError.
    """
    source = Source(START_FROM, settings.dflash.start_from)
    if not source.value:
        return build(configure(settings, target), target)
    if held is not None:  # the drafter that it began from may be gone
        return build(configure(settings, target, held), target)
    found = load(source, run, team)
    algorithm = build(configure(settings, target, found.config), target)
    starting.take_weights(algorithm, found, target, source)
    return algorithm


def build(config: DrafterConfig, target: Target) -> DFlash:
    """A new drafter: the last norm starts as the target's, everything else at random."""
    algorithm = DFlash(config, target)
    with torch.no_grad():
        for module in algorithm.drafter.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
        algorithm.drafter.norm.weight.copy_(target.norm_scale)
    return algorithm


def _layer_types(knobs: Knobs) -> list[str]:
    types: list[str] = list(knobs.layer_types or ["full_attention"] * knobs.num_layers)
    if len(types) != knobs.num_layers:
        raise SettingsError(
            f"dflash.layer_types has {len(types)} entries, dflash.num_layers is {knobs.num_layers}: name each layer."
        )
    if "sliding_attention" in types and knobs.sliding_window is None:
        raise SettingsError(
            "dflash.layer_types has sliding_attention, and dflash.sliding_window is not set: say how many positions "
            "such a layer sees, for example 2048."
        )
    return types
