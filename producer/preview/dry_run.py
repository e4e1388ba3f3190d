"""`draftfleet produce --dry-run`: read the data set as `produce` would, and tell of it. docs/dry-run.md explains it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from draftfleet import tokens
from draftfleet.errors import StorageError, TargetError
from draftfleet.records import Prompt
from draftfleet.settings import Settings
from draftfleet.storage import Storage, open_storage
from producer.preview import opened
from producer.preview.evidence import Evidence, evidence
from producer.preview.lengths import Lengths, Ruler
from producer.preview.masks import Picks, Shown, shown
from producer.preview.rendered import render
from producer.preview.survey import Survey, existing_run, survey
from producer.preview.work import Work, work
from producer.progress import watched

MEASURED_PROMPTS = 20_000
SHOWN_PROMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What `produce` would find and put. `notes` are what a person should know first."""

    run: str
    model: str
    survey: Survey
    lengths: Lengths
    shown: list[Shown]
    work: Work
    special_texts: list[str]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"dry_run": True, **asdict(self)}


def show(settings: Settings, *, as_json: bool, progress: bool, **knobs: Any) -> int:
    """Print it: for a person, or as one JSON line. Returns exit code 0."""
    found = dry_run(settings, progress=progress, **knobs)
    if as_json:
        print(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        render(found, Console(highlight=False, soft_wrap=True))
    return 0


def dry_run(
    settings: Settings,
    *,
    num_shown: int = SHOWN_PROMPTS,
    num_measured: int = MEASURED_PROMPTS,
    mean_tokens: float | None = None,
    tokens_per_s: float | None = None,
    num_servers: int = 0,
    progress: bool = False,
) -> DryRun:
    """Read all of it and write nothing; Redis is not asked. `num_measured` prompts are tokenized, 0: all.

    Raises SettingsError or DataError, as `produce` would.
    """
    reading = opened(settings)
    every_turn = settings.producer.turns == "all"
    storage, notes = _storage(settings)
    run, refusals = existing_run(storage, settings) if storage else (None, [])
    notes += refusals
    if not settings.model:
        notes.append("produce would refuse: target.model is not set. Give the name under which the servers serve it.")
    tokenizer, context = _target(settings, notes)
    ruler = Ruler(tokenizer, settings.sampling, context, num_measured)
    picks = Picks(num_shown)

    def each(prompt: Prompt) -> None:
        ruler.add(prompt)
        picks.add(prompt)

    with watched(reading.source, reading, enabled=progress, doing="reading"):
        met = survey(reading, run, every_turn=every_turn, each=each)
    bars = progress and tokenizer is not None
    for _ in track(ruler.measured(), "tokenizing", ruler.rounds(), console=Console(stderr=True), disable=not bars):
        pass
    lengths = ruler.lengths()
    return DryRun(
        run=settings.run,
        model=settings.model,
        survey=met,
        lengths=lengths,
        shown=[shown(one, tokenizer, settings.sampling, every_turn=every_turn) for one in picks.chosen()],
        work=work(
            met,
            lengths,
            samples=int(getattr(settings.sampling, "n", 1)),
            earlier=_evidence(storage, settings),
            mean_tokens=mean_tokens,
            tokens_per_s=tokens_per_s,
            servers=num_servers,
            named_servers=len(settings.worker.servers),
            free_bytes=_free_bytes(storage),
        ),
        special_texts=tokenizer.special_texts if tokenizer is not None else [],
        notes=[*notes, *_warnings(met, lengths)],
    )


def _storage(settings: Settings) -> tuple[Storage | None, list[str]]:
    try:
        return open_storage(settings.storage), []
    except StorageError as error:
        return None, [f"produce would refuse: {error}"]


def _evidence(storage: Storage | None, settings: Settings) -> Evidence | None:
    return evidence(storage, settings.run, settings.model) if storage else None


def _free_bytes(storage: Storage | None) -> int | None:
    try:
        return storage.free_bytes() if storage else None
    except (StorageError, OSError):  # the folder is made by `produce`
        return None


def _target(settings: Settings, notes: list[str]) -> tuple[tokens.TargetTokenizer | None, int | None]:
    """Its tokenizer and its context, where this machine has them."""
    path = Path(settings.target.path).expanduser() if settings.target.path else None
    context = settings.target.context_tokens or (tokens.context_tokens(path) if path else None)
    if path is None:
        notes.append(
            "target.path is not set: lengths are in characters, and prompts are shown without the target's template. "
            "Name the folder of its tokenizer.json with --target to see what the model will see."
        )
        return None, context
    try:
        return tokens.load(path), context
    except TargetError as error:
        notes.append(f"lengths are in characters, and prompts are shown without the target's template: {error}")
        return None, context


def _warnings(met: Survey, lengths: Lengths) -> list[str]:
    found: list[str] = []
    if lengths.unit == "tokens" and lengths.context_tokens is None:
        found.append(
            "how long the target's context is, is not known: set target.context_tokens to see what is over it."
        )
    if lengths.unrenderable:
        found.append(
            f"the chat template refuses {lengths.stand_for(lengths.unrenderable)} prompts, and so will the servers: "
            f"each becomes a failed row. The first: {lengths.unrenderable_example}"
        )
    if lengths.too_long:
        found.append(
            f"{lengths.stand_for(lengths.too_long)} prompts fill the context of {lengths.context_tokens:,} tokens by "
            "themselves: each becomes a failed row. Serve the target with a longer context, or leave them out."
        )
    if met.overlap:
        found.append(
            f"{met.overlap:,} held-out prompts also stand among the train prompts by their last user turn: "
            "if these are many, the evaluation is too kind."
        )
    return found
