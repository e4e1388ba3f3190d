"""Where a run came from: versions, pinned settings, data sets, the command, and hashes of what is there."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import draftfleet
from draftfleet.export_data.card import sources_of
from draftfleet.redaction import redact
from draftfleet.report import words
from draftfleet.report.rows import Row
from draftfleet.runs import Run

LONGEST_VALUE = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Tables of names and values. `sources` has one for each data set."""

    run: dict[str, str]
    pinned: dict[str, str]
    sources: list[dict[str, str]]
    made_of: dict[str, str]


def origin_of(run: Run, rows: Sequence[Row], command: str) -> Origin:
    info, sealed = run.info, run.sealed() or {}
    about = {
        "run": info.run,
        "run id": info.run_id,
        "storage": redact(run.storage.url),
        "made": f"{words.moment(info.created_at)} UTC by draftfleet {info.product_version}",
        "schema of its records": str(info.schema_version),
        "sealed": f"{words.moment(sealed['sealed_at'])} UTC"
        if "sealed_at" in sealed
        else "no"
        if not sealed
        else "yes",
        "made with": _value(info.provenance.get("command")),
        "on": _value(
            ", ".join(
                str(info.provenance[name]) for name in ("host", "python") if info.provenance.get(name) is not None
            )
        ),
        "SHA-256 of run.json": hashlib.sha256(run.storage.read(f"{run.name}/run.json")).hexdigest(),
        **_shards(run),
        "this report": f"draftfleet {draftfleet.__version__}: {redact(command)}",
    }
    servers = Counter(f"{row.dialect}" for row in rows if row.dialect)
    made = {"answers by dialect": ", ".join(f"{name} {words.number(count)}" for name, count in servers.most_common())}
    return Origin(
        run={name: value for name, value in about.items() if value},
        pinned={name: _value(value) for name, value in info.content.items()},
        sources=[_source(source) for source in sources_of(run)],
        made_of={name: value for name, value in made.items() if value},
    )


def _shards(run: Run) -> dict[str, str]:
    """One hash for all shards of a kind, of their own hashes in order of their names, as the index has them."""
    found: dict[str, str] = {}
    for kind in ("prompts", "samples"):
        entries = run.index.read(kind)
        if entries:
            lines = "".join(f"{entries[name].sha256}  {name}\n" for name in sorted(entries))
            digest = hashlib.sha256(lines.encode()).hexdigest()
            found[f"SHA-256 of {len(entries):,} {kind} shards"] = digest
    return found


def _source(source: Mapping[str, Any]) -> dict[str, str]:
    return {name: _value(value) for name, value in source.items()}


def _value(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return words.clipped(redact(text), LONGEST_VALUE)
