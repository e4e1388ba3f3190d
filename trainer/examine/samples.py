"""The ids of a run against the target: would it have said this?

If tokens were drawn from the target's distribution p, the mean of -log p over them is the mean entropy of p, whatever
the text; greedier sampling lies below. Tokens of another model, or after another prompt, lie above: they surprise it.
"""

# T tokens, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from draftfleet.names import split_of
from draftfleet.runs import Run
from draftfleet.settings import Settings
from trainer.data import kept_rows
from trainer.examine.finding import Found
from trainer.examine.reference import Reference
from trainer.targets import Row

NUM_ROWS = 16
NUM_TOKENS = 1024

FAULT_NATS, WARNING_NATS = 0.7, 0.15
"""Surprise above the entropy, a token. Served in FP8 or in another precision a target stays far below either."""

FAULT_GREEDY, WARNING_GREEDY = 0.8, 0.95
"""Share of a greedy run's tokens that are the target's first choice."""

SURE = 6.0
"""Standard errors that a surprise must lie above zero."""


def rows_of_run(run: Run, settings: Settings, vocab_size: int) -> list[Row]:
    """The first rows that would be trained on."""
    rows: list[Row] = []
    max_tokens = min(NUM_TOKENS, settings.trainer.max_length)
    batches = (batch for batch in run.done() if split_of(batch) == "train")
    for kept in kept_rows(run, batches, max_tokens=max_tokens, vocab_size=vocab_size):
        rows += [one.row() for one in kept]
        if len(rows) >= NUM_ROWS:
            break
    return rows[:NUM_ROWS]


def compare(reference: Reference, rows: list[Row], run: Run) -> Iterator[Found]:
    temperature = run.info.content.get("sampling.temperature")
    is_greedy = temperature == 0
    scale = float(temperature) if isinstance(temperature, int | float) and temperature > 0 else 1.0
    surprise = variance = 0.0
    count = first = 0
    for row in rows:
        logits = reference.logits(row.ids)[:-1][row.mask[1:].to(reference.device)]
        ids = row.ids[1:][row.mask[1:]].to(logits.device)
        log_p = torch.log_softmax(logits / scale, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        said = -log_p.gather(-1, ids[:, None])[:, 0]
        surprise += float((said - entropy).sum())
        variance += float(((log_p.exp() * log_p**2).sum(-1) - entropy**2).clamp(min=0).sum())
        first += int((logits.argmax(-1) == ids).sum())
        count += len(ids)
    nats, share = surprise / count, first / count
    is_sure = surprise > SURE * math.sqrt(variance + 1e-6)
    values: dict[str, Any] = {
        "rows": len(rows), "tokens": count, "first_choice": share, "surprise_nats": nats, "temperature": temperature
    }  # fmt: skip
    said = f"{share:.1%} of {count} tokens of {len(rows)} rows are the target's first choice, surprise {nats:+.2f} nats"
    fix = (
        "point target.path at the model that the servers serve, with its template; or the run was made by another "
        "model, revision or quantisation: begin a new one"
    )
    if (is_sure and nats > FAULT_NATS) or (is_greedy and share < FAULT_GREEDY):
        yield Found("fault", "samples", f"the target would not have said what the run recorded: {said}", fix, values)
    elif (is_sure and nats > WARNING_NATS) or (is_greedy and share < WARNING_GREEDY):
        yield Found(
            "warning", "samples", f"the target would hardly have said what the run recorded: {said}", fix, values
        )
    else:
        yield Found("ok", "samples", f"the target would have said what the run recorded: {said}", "", values)
