"""Captured states against those of the plain model: which layer each really is, and whether the last is normed."""

# T tokens, D hidden size of the target, K chosen layers, L decoder layers

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.examine.finding import Found
from trainer.examine.reference import Reference, States
from trainer.targets import Captured, Row, Target

NUM_ROWS = 4
NUM_TOKENS = 128
"""Of each row: all layers of all of them are in memory at once."""

EXACT, ROUNDED = 1e-3, 0.1
"""Largest mean error of a state, relative to its length: of float32 numbers, and of those rounded on the way."""

UNLIKE = 0.3
"""With an error of this much to the layer that was asked for, states are of other ids or other weights."""


def random_rows(vocab_size: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (NUM_ROWS, NUM_TOKENS), generator=generator)
    return [Row(f"random-{number}", one, torch.ones(NUM_TOKENS).bool()) for number, one in enumerate(ids)]


def few(rows: Sequence[Row]) -> list[Row]:
    """Some of the rows, cut."""
    return [Row(row.key, row.ids[:NUM_TOKENS], row.mask[:NUM_TOKENS]) for row in rows[:NUM_ROWS]]


def compare(
    target: Target, reference: Reference, captured: list[Captured], *,
    asked: list[Row], layers: list[int], expected: list[States], is_exact: bool,
) -> Iterator[Found]:  # fmt: skip
    """Findings on what was captured of the rows and layers that were asked for."""
    limit = EXACT if is_exact else ROUNDED
    if wrong := _rows_differ(asked, captured):
        yield Found("fault", "rows", wrong, "the target hands on other rows than it was asked for: report it", {})
        return
    ends = {
        "embedding": _error(target.embedding, reference.embedding),
        "head": _error(target.head, reference.head),
    }
    if max(ends.values()) > limit:
        found = ", ".join(f"its {name} differs by {error:.2g}" for name, error in ends.items() if error > limit)
        yield Found(
            "fault", "ends", f"{found} of its length", "point target.path at the model that the target runs", ends
        )
    else:
        yield Found("ok", "ends", "embedding and head are the model's own", "", ends)

    states = torch.cat([one.hidden for one in captured]).float().cpu().unflatten(-1, (len(layers), -1))
    if target.layers != layers:
        found = f"layers {layers} were asked for, the target says that it captured {target.layers}"
        yield Found("fault", "layers", found, "configure the target for the layers of this drafter", {})
    for index, layer in enumerate(layers):
        yield _layer(layer, states[:, index], expected, reference, limit)
    yield _last(target, reference, captured, expected, limit)


def _rows_differ(asked: list[Row], captured: list[Captured]) -> str:
    if [one.row.key for one in captured] != [row.key for row in asked]:
        return f"rows {[row.key for row in asked]} were asked for, {[one.row.key for one in captured]} came"
    for one, row in zip(captured, asked, strict=True):
        if not len(one.hidden) == len(one.last) == len(row.ids):
            return (
                f"row {row.key} has {len(row.ids)} ids, {len(one.hidden)} hidden and {len(one.last)} last states came"
            )
    return ""


def _layer(layer: int, states: Tensor, expected: list[States], reference: Reference, limit: float) -> Found:
    """Which layer of the model these states (all T, D) are the output of."""
    errors = {
        other: _error(states, torch.cat([one.hidden[other + 1] for one in expected]))
        for other in range(-1, reference.num_layers - 1)
    }
    # Hugging Face norms the output of the last layer.
    normed = torch.cat([one.hidden[-1] for one in expected])
    errors[reference.num_layers - 1] = _error(reference.normed(states), normed)
    nearest = min(errors, key=errors.__getitem__)
    values: dict[str, Any] = {"layer": layer, "nearest": nearest, "error": errors[layer]}
    if nearest == layer and errors[layer] <= limit:
        found = f"layer {layer} is hidden_states[{layer + 1}] of Hugging Face, to {errors[layer]:.1g}"
        return Found("ok", "layers", found, "", values)
    if nearest != layer and errors[nearest] <= limit:
        off = nearest - layer
        what = {1: "off by one, too late", -1: "off by one, too early"}.get(off, f"off by {off:+d}")
        found = f"what was captured at layer {layer} is the output of layer {nearest}: {what}"
        fix = "layer ids count from 0 and mean outputs; vLLM's and speculators' are larger by one (docs/targets.md)"
        return Found("fault", "layers", found, fix, values)
    if nearest == layer and errors[layer] < UNLIKE:
        found = f"layer {layer} differs by {errors[layer]:.2g} of its length from the model's, {limit:g} are allowed"
        fix = "compare dtype, quantisation and RoPE scaling of what the target runs with target.path"
        return Found("fault", "layers", found, fix, values)
    found = (
        f"what was captured at layer {layer} is the output of no layer of this model for these ids: the nearest, "
        f"layer {nearest}, differs by {errors[nearest]:.2g} of its length"
    )
    fix = "compare the token ids and the weights that the target runs with the row's and with target.path"
    return Found("fault", "layers", found, fix, values)


def _last(
    target: Target, reference: Reference, captured: list[Captured], expected: list[States], limit: float
) -> Found:
    last = torch.cat([one.last for one in captured])
    normed = torch.cat([one.hidden[-1] for one in expected])
    logits = torch.cat([one.logits for one in expected])
    error = _error(target.logits(last), logits)
    values = {"logits_error": error, "error": _error(reference.normed(last), normed)}
    if values["error"] <= limit and error <= limit:
        found = f"the last state is before the final norm: norm and head make the model's logits of it, to {error:.1g}"
        return Found("ok", "last", found, "", values)
    if _error(last, normed) <= limit:
        found = "the last state has passed the final norm already; it would be normed twice"
        return Found("fault", "last", found, "capture the residual stream that enters the final norm", values)
    for layer in range(reference.num_layers - 1):
        if _error(last, torch.cat([one.hidden[layer + 1] for one in expected])) <= limit:
            found = f"the last state is the output of layer {layer}, not of layer {reference.num_layers - 1}"
            return Found("fault", "last", found, "capture the residual stream that enters the final norm", values)
    found = (
        f"norm and head do not make the model's logits of the last state: they differ by {error:.2g} of their length, "
        f"the normed state by {values['error']:.2g}, {limit:g} are allowed"
    )
    return Found(
        "fault",
        "last",
        found,
        "compare ids, weights and final norm of what the target runs with target.path",
        values,
    )


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Mean over tokens of the length of the difference, relative to the length of what it should be."""
    one, other = ours.float().cpu(), theirs.float().cpu()
    if one.shape != other.shape:
        return float("inf")
    lengths = other.norm(dim=-1).clamp(min=1e-12)
    return float(((one - other).norm(dim=-1) / lengths).mean())
