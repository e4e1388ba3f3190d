"""Training that goes on from another DFlash drafter's weights.

The block size may change, since no weight depends on it; so may anchors, labels and weights of the loss.
"""

from __future__ import annotations

from dataclasses import replace

from draftfleet.errors import TargetError
from trainer.algorithms.dflash.algorithm import DFlash
from trainer.algorithms.dflash.model import is_causal, window
from trainer.algorithms.starting import Source, expect_embedding, expect_weights, of_the_shape_of
from trainer.drafter import DrafterConfig
from trainer.export.importing import Imported
from trainer.targets import Target

KNOBS = {
    "layers": "trainer.layers",
    "num_layers": "dflash.num_layers",
    "layer_types": "dflash.layer_types",
    "sliding_window": "dflash.sliding_window",
    "causal": "dflash.causal",
    "mask_token_id": "dflash.mask_token_id",
}
"""What a drafter to start from was built with, and the knob that must say the same."""


def shaped(start: DrafterConfig, own: DrafterConfig, source: Source) -> DrafterConfig:
    """`own`, with the shape of `start` that no knob says. Raises as `of_the_shape_of` does."""
    if start.algorithm == own.algorithm and start.draft_vocab_size is not None:
        raise TargetError(
            f"{source} holds a drafter of {start.draft_vocab_size} tokens, with a head of its own: draftfleet trains "
            f"DFlash for the whole vocabulary of the target, {own.vocab_size}."
        )
    return of_the_shape_of(_plain(start), _plain(own), source, KNOBS)


def take_weights(algorithm: DFlash, found: Imported, target: Target, source: Source) -> None:
    """Raises DrafterError where they do not fit, TargetError where they are for another target."""
    expect_embedding(found.embedding, target, source)
    expect_weights(found.tensors, algorithm.drafter.state_dict(), source)
    algorithm.drafter.load_state_dict(found.tensors)


def _plain(config: DrafterConfig) -> DrafterConfig:
    """The same drafter in one way of saying it: what is left unset, or has no effect, is written in many."""
    if config.algorithm != "dflash":
        return config
    kinds = list(config.layer_types) or ["full_attention"] * config.num_layers
    layers = range(min(len(kinds), config.num_layers))
    is_usual = all(is_causal(config, layer) == (window(config, layer) is not None) for layer in layers)
    return replace(
        config,
        layer_types=kinds,
        sliding_window=config.sliding_window if "sliding_attention" in kinds else None,
        causal=None if is_usual else config.causal,
    )
