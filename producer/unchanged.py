"""A data set that an earlier pass has read is recognised by its content, and not read again.

`sealed.json` keeps a fingerprint of each data set that was read: of the bytes of its files, or its commit on the hub,
of what decides how they are read, and of the product's version. A run only grows, so what was added from the same
bytes is still there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import draftfleet
from draftfleet import drawing, settings
from draftfleet.runs import Run
from producer.chosen import chosen, counts_tokens
from producer.report import Report
from producer.sources import Source

READ_HOW = ("split_column", "heldout", "limit", "strict", "seed", "until", "turns")
"""Knobs that decide what is read of the same bytes, beside those of each source."""


def fingerprint(source: Source, knobs: settings.Producer) -> str | None:
    """None where nothing tells that the data set is the same: a pipe, a file above the limit, a saved data set.

    Nor where prompts are chosen by their length in tokens: the tokenizer may be another one.
    """
    sources = chosen(knobs)
    if source.digest is None or counts_tokens(sources):
        return None
    facts: dict[str, Any] = {"digest": source.digest, "version": draftfleet.__version__}
    facts |= {name: getattr(knobs, name) for name in READ_HOW}
    facts["sources"] = [one.model_dump(exclude={"name", "data", "preset"}) for one in sources]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def earlier_report(run: Run, source: Source, known: str | None, batches: Sequence[str]) -> Report | None:
    """What a pass would report that read this data set again; None if it has to be read.

    It has to be, too, where the run is not sealed or lacks a prompt shard that it had.
    """
    started = time.monotonic()
    sealed = run.sealed()
    if sealed is None or known is None or sealed["batches"] != len(batches):
        return None
    counts = passes_of(run).get(known)
    if counts is None:
        return None
    sources: Any = [{**one, "new": 0, "already": one["prompts"]} for one in counts.get("sources", ())]
    return Report(
        run=run.name,
        run_id=run.run_id,
        source=source.name,
        already_read=True,
        new=0,
        already=counts["prompts"],
        samples=counts["prompts"] * drawing.asked(run).n,
        batches=0,
        run_prompts=sealed["prompts"],
        run_samples=sealed.get("samples", sealed["prompts"]),
        run_train=sealed["train"],
        run_heldout=sealed["heldout"],
        run_batches=sealed["batches"],
        overlap=sealed["overlap"],
        drawn=sealed.get("drawn", []),
        seconds=time.monotonic() - started,
        **counts | {"sources": sources},
    )


def passes_of(run: Run) -> dict[str, dict[str, Any]]:
    """The counts of each pass that can be recognised, by fingerprint; none of a run that is not sealed."""
    return (run.sealed() or {}).get("passes", {})


def with_pass(passes: dict[str, Any], known: str | None, report: Report, source: Source) -> dict[str, Any]:
    """The passes and this one, unless its file was written to while it was read."""
    if known is None or not source.is_unchanged():
        return passes
    kept = ("lines", "prompts", "duplicates", "malformed", "rejected", "rejected_for", "train", "heldout", "sources")
    counts = asdict(report)
    return passes | {known: {name: counts[name] for name in kept}}
