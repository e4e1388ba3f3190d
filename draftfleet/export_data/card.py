"""The data card, README.md: what the rows are, where they came from, how they were made; front matter for the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, cast

import draftfleet
from draftfleet.export_data.tally import Tally, histogram, quantiles
from draftfleet.export_data.units import Wanted
from draftfleet.names import Split
from draftfleet.redaction import redact
from draftfleet.runs import Run

TEMPLATE = Path(__file__).with_name("card.md.j2")
SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
SIZES_ABOVE = ((10_000_000, "1M<n<10M"), (100_000_000, "10M<n<100M"), (1_000_000_000, "100M<n<1B"))
BAR = 40
"""Characters of the longest bar of a histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How far the run was. `pending` and `expected` are None where they could not be counted, or are not known yet."""

    complete: bool
    expected: int | None
    pending: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the card tells, and `export.json` for programs. `files` are the globs of the splits."""

    run: Run
    wanted: Wanted
    tally: Tally
    state: State
    files: Mapping[Split, str]
    corrupt: Sequence[str]
    license: str | None
    command: str
    date: str


def write(folder: Path, facts: Facts) -> None:
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    tally, run = facts.tally, facts.run
    template = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    ).from_string(TEMPLATE.read_text())
    lengths = {"prompt": tally.prompt_lengths, "completion": tally.completion_lengths}
    text = template.render(
        front=_front(facts),
        **{name: getattr(facts, name) for name in facts.__slots__},
        info=run.info,
        splits=list(facts.files),
        sources=sources_of(run),
        version=draftfleet.__version__,
        quantiles={name: quantiles(counted) for name, counted in lengths.items()},
        histograms={name: _bars(histogram(counted)) for name, counted in lengths.items()},
        pinned={name: _cell(value) for name, value in run.info.content.items()},
        share=_share,
        cell=_cell,
    )
    (folder / "README.md").write_text(redact(text), encoding="utf-8")


def as_json(facts: Facts, files: Sequence[Mapping[str, Any]]) -> str:
    """The same in short, with the hash of each file."""
    said = {
        "run": facts.run.name,
        "run_id": facts.run.run_id,
        "product_version": draftfleet.__version__,
        "exported_at": facts.date,
        "command": facts.command,
        "wanted": asdict(facts.wanted),
        "content": facts.run.info.content,
        "sources": sources_of(facts.run),
        "lines": dict(facts.tally.lines),
        "keys_sha256": facts.tally.keys,
        "complete": facts.state.complete,
        "corrupt": list(facts.corrupt),
        "files": files,
    }
    return redact(json.dumps(said, indent=2, ensure_ascii=False)) + "\n"


def sources_of(run: Run) -> list[dict[str, Any]]:
    """The data sets that the run was made of, as far as it says: the first pass and the last, or all of a mixture.

    Of a file its name, not its folder: a card is for others.
    """
    sealed = run.sealed() or {}
    found: list[dict[str, Any]] = []
    for said in (run.info.provenance.get("data.source"), sealed.get("last_source")):
        if not isinstance(said, dict):
            continue
        one = cast(dict[str, Any], said)
        parts = one.get("sources")
        for part in cast(list[dict[str, Any]], parts) if isinstance(parts, list) else [one]:
            shown = {name: value for name, value in part.items() if value not in (None, "", [], {})}
            shown.pop("modified_at", None)
            if "path" in shown:
                shown["path"] = PurePath(str(shown["path"])).name
            if shown not in found:
                found.append(shown)
    return found


def _front(facts: Facts) -> str:
    """YAML, of which JSON is a part: so nothing in a value can break out of it."""
    data_files = [{"split": split, "path": glob} for split, glob in facts.files.items()]
    fields: dict[str, Any] = {
        "license": facts.license or "unknown",
        "task_categories": ["text-generation"],
        "tags": ["draftfleet", "speculative-decoding", "synthetic"],
        "size_categories": [size_category(facts.tally.num_lines)],
        "configs": [{"config_name": "default", "data_files": data_files}],
    }
    return "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())


def size_category(num_lines: int) -> str:
    """As the hub calls it."""
    return next((name for limit, name in (*SIZES, *SIZES_ABOVE) if num_lines < limit), "n>1T")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _bars(bins: Sequence[tuple[str, int]]) -> str:
    most = max((count for _, count in bins), default=0)
    width = max((len(name) for name, _ in bins), default=0)
    return "\n".join(f"{name:>{width}}  {'#' * -(-BAR * count // most):{BAR}}  {count:,}" for name, count in bins)


def _cell(value: Any) -> str:
    """In a table, on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return " ".join(text.replace("|", "\\|").split())
