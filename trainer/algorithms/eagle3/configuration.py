"""The shape of an EAGLE-3 drafter: from its target and [eagle3], or from the drafter that it starts from."""

from __future__ import annotations

from typing import Any, Literal

from draftfleet.errors import SettingsError
from draftfleet.settings import Settings
from trainer.algorithms.shape import of_target
from trainer.algorithms.starting import Source, of_the_shape_of
from trainer.drafter import DrafterConfig
from trainer.targets import Target

KNOBS = {
    "layers": "trainer.layers",
    "draft_vocab_size": "eagle3.draft_vocab_size",
    "style": "eagle3.style",
    "fc_norm": "eagle3.fc_norm",
    "norm_before_fc": "eagle3.norm_before_fc",
    "norm_output": "eagle3.norm_output",
    "norm_before_residual": "eagle3.norm_before_residual",
}
"""What a drafter to start from was built with, and the knob that must say the same."""

UNDER_MUON = 0.02
"""Where the matrices begin, whose updates do not take away what was random: docs/decisions/0014-muon.md."""


def configure(settings: Settings, target: Target, start: DrafterConfig | None = None) -> DrafterConfig:
    """A drafter as wide as the target, with its heads, its feed-forward size and its positions; or of the shape of
    `start`, which must be of this target and of these settings.

    Raises SettingsError or TargetError.
    """
    config, knobs = target.config, settings.eagle3
    vocab_size = len(target.embedding)
    if knobs.draft_vocab_size is not None and knobs.draft_vocab_size > vocab_size:
        raise SettingsError(
            f"eagle3.draft_vocab_size = {knobs.draft_vocab_size}: the target has a vocabulary of {vocab_size}. Unset "
            "it to draft all of that."
        )
    if knobs.fc_norm and knobs.norm_before_fc:
        raise SettingsError(
            "eagle3.fc_norm and eagle3.norm_before_fc are both set, and norm the same states: speculators refuses such "
            "a drafter. Choose one; fc_norm is that of EAGLE-3.1."
        )
    own = DrafterConfig(
        algorithm="eagle3",
        **of_target(settings, target),
        style=_style(knobs.style, config, start),
        draft_vocab_size=None if knobs.draft_vocab_size == vocab_size else knobs.draft_vocab_size,
        ttt_steps=settings.trainer.ttt_steps,
        step_decay=settings.trainer.step_decay,
        loss=knobs.loss,
        head=knobs.head,
        fc_norm=knobs.fc_norm,
        norm_before_fc=knobs.norm_before_fc,
        norm_output=knobs.norm_output,
        norm_before_residual=knobs.norm_before_residual,
        begins_at=UNDER_MUON if settings.trainer.optimizer == "muon" else None,
    )
    if start is None:
        return own
    source = Source("eagle3.start_from", knobs.start_from)
    if start.num_layers != own.num_layers:
        raise SettingsError(f"{source} holds a drafter with {start.num_layers} layers: name one with {own.num_layers}.")
    return of_the_shape_of(start, own, source, KNOBS)


def _style(knob: str, config: Any, start: DrafterConfig | None) -> Literal["llama", "qwen3"]:
    if knob == "auto" and start is not None:
        return start.style
    is_qwen3 = str(getattr(config, "model_type", "")).startswith("qwen3") if knob == "auto" else knob == "qwen3"
    return "qwen3" if is_qwen3 else "llama"
