"""A data set that an earlier pass has read is recognised by its content, and not read again.

`sealed.json` keeps a fingerprint of each file that was read to its end: of its bytes, of what decides how they are
read, and of the product's version. A run only grows, so what was added from the same bytes is still there.
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
from producer.report import Report
from producer.sources import Source


def fingerprint(source: Source, knobs: settings.Producer) -> str | None:
    """None where nothing tells that the data set is the same: a pipe, a `datasets` data set, a file above the limit."""
    sha256 = source.provenance.get("sha256")
    if sha256 is None:
        return None
    read_how = {name: getattr(knobs, name) for name in ("column", "split_column", "heldout", "limit", "strict")}
    facts = {"sha256": sha256, "kind": source.provenance["kind"], "version": draftfleet.__version__, **read_how}
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
        **counts,
    )


def passes_of(run: Run) -> dict[str, dict[str, Any]]:
    """The counts of each pass that can be recognised, by fingerprint; none of a run that is not sealed."""
    return (run.sealed() or {}).get("passes", {})


def with_pass(passes: dict[str, Any], known: str | None, report: Report, source: Source) -> dict[str, Any]:
    """The passes and this one, unless its file was written to while it was read."""
    if known is None or not source.is_unchanged():
        return passes
    kept = ("lines", "prompts", "duplicates", "malformed", "rejected", "rejected_for", "train", "heldout")
    counts = asdict(report)
    return passes | {known: {name: counts[name] for name in kept}}
