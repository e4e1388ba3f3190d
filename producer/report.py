"""What one pass over a data set met, and what `sealed.json` keeps of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from draftfleet import drawing
from draftfleet.runs import Run
from draftfleet.settings import Sampling
from producer.ledger import Ledger
from producer.part import Part
from producer.reading import Reading
from producer.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one pass over a data set met. `lines` = `prompts` + `duplicates` + `malformed` + `rejected`.

    `prompts` are the distinct ones: `new` + `already` (in the run before), and `train` + `heldout`; `samples` are these
    times sampling.n. The `run_` counts, `overlap` (held-out prompts whose normalised text also stands among the train
    prompts) and `drawn` (how many rows are asked in which way, where there is a choice) are of the whole run. With
    `already_read` nothing was read: an earlier pass has read the same, and its counts are told again. `sources` has the
    counts of each of a mixture, in the same words.
    """

    run: str
    run_id: str
    source: str
    already_read: bool = False
    lines: int
    prompts: int
    samples: int
    new: int
    already: int
    duplicates: int
    malformed: int
    rejected: int
    rejected_for: dict[str, int]
    train: int
    heldout: int
    batches: int
    run_prompts: int
    run_samples: int
    run_train: int
    run_heldout: int
    run_batches: int
    overlap: int
    drawn: list[dict[str, Any]]
    sources: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seconds: float

    def __post_init__(self) -> None:
        assert self.lines == self.prompts + self.duplicates + self.malformed + self.rejected, self
        assert self.prompts == self.train + self.heldout == self.new + self.already, self

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def report_of(
    run: Run,
    reading: Reading,
    ledger: Ledger,
    *,
    sampling: Sampling,
    num_before: int,
    num_written: int,
    overlap: int,
    seconds: float,
) -> Report:
    prompts, run_prompts = ledger.new + ledger.already, ledger.run_splits.total()
    return Report(
        run=run.name,
        run_id=run.run_id,
        source=reading.source.name,
        lines=reading.lines,
        prompts=prompts,
        samples=prompts * sampling.n,
        new=ledger.new,
        already=ledger.already,
        duplicates=ledger.duplicates + reading.duplicates,
        malformed=reading.malformed,
        rejected=reading.rejected.total(),
        rejected_for=dict(reading.rejected),
        train=ledger.pass_splits["train"],
        heldout=ledger.pass_splits["heldout"],
        batches=num_written,
        run_prompts=run_prompts,
        run_samples=run_prompts * sampling.n,
        run_train=ledger.run_splits["train"],
        run_heldout=ledger.run_splits["heldout"],
        run_batches=num_before + num_written,
        overlap=overlap,
        drawn=drawing.count(sampling, ledger.row_keys(sampling.n)),
        sources=[_source(part, ledger.by_source[part.name]) for part in reading.parts if len(reading.parts) > 1],
        seconds=seconds,
    )


def _source(part: Part, met: Counter[str]) -> dict[str, Any]:
    """`ended` is false where its lines were not all read, since another source of the mixture had ended."""
    return {
        "name": part.name,
        "data": part.source.name,
        "lines": part.lines,
        "prompts": met["new"] + met["already"],
        "new": met["new"],
        "already": met["already"],
        "duplicates": met["duplicates"] + part.duplicates,
        "malformed": part.malformed,
        "rejected": part.rejected.total(),
        "rejected_for": dict(part.rejected),
        "ended": part.has_ended,
    }


def totals(report: Report, source: Source, passes: dict[str, Any]) -> dict[str, Any]:
    """sealed.json: `prompts`, `samples` and their fellows are of the whole run, `last_pass` is the report of this one.

    `passes` are the reports of all data sets that can be recognised, by fingerprint.
    """
    return {
        "prompts": report.run_prompts,
        "samples": report.run_samples,
        "train": report.run_train,
        "heldout": report.run_heldout,
        "batches": report.run_batches,
        "overlap": report.overlap,
        "drawn": report.drawn,
        "last_pass": asdict(report),
        "last_source": source.provenance,
        "passes": passes,
        "sealed_at": time.time(),
    }
