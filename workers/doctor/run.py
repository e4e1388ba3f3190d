"""The run: whether it is there, whether these settings may add to it, and its first prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftfleet import connection, control, fleet
from draftfleet.errors import CorruptFile, DraftfleetError, RunMissing, RunNewer
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.storage import open_storage
from workers.batch import Content
from workers.doctor.case import PROMPTS, Case
from workers.doctor.findings import Finding, fault, of_error, ok, skipped, warning


def look(case: Case) -> Iterator[Finding]:
    """Opens the run, and reads the prompts for the canary."""
    name = case.settings.run
    storage = open_storage(case.settings.storage)
    try:
        run = Run.open(storage, name)
    except RunMissing as error:
        if storage.exists(f"{name}/run.json"):  # it is being deleted
            yield of_error("run", error, f"`draftfleet runs delete {name}`, or `--run` with another name")
        else:
            yield ok("run", f"{name} is new", run=name, is_new=True)
    except (RunNewer, CorruptFile) as error:
        yield of_error("run", error)
    else:
        case.content = Content.of(run)
        case.run = run
        yield from _state(run)
    yield from _prompts(case)


def _state(run: Run) -> Iterator[Finding]:
    batches, done = run.batches(), run.done()
    sealed = run.sealed()
    said = f"{run.name} is there, {len(done)} of {len(batches)} batches done, " + (
        f"sealed with {sealed.get('prompts')} prompts" if sealed else "not sealed: its producer has not ended"
    )
    yield ok("run", said, run=run.name, run_id=run.run_id, batches=len(batches), done=len(done), sealed=bool(sealed))
    controlled = control.read(run)
    if not controlled.is_running:
        yield warning(
            "orders",
            f"{run.name} is {controlled.state}: {controlled.reason or 'no reason was given'}; workers take none of it",
            f"`draftfleet resume {run.name}`",
            state=controlled.state,
        )


def _prompts(case: Case) -> Iterator[Finding]:
    if case.run is not None:
        case.prompts, case.prompts_from = _of_shards(case.run), f"run {case.run.name}"
    knobs = case.settings.producer
    if not case.prompts and case.first_prompts is not None and _names_data(case):
        try:
            case.prompts = case.first_prompts(case.settings, PROMPTS)
            named = [knobs.data] if isinstance(knobs.data, str) else knobs.data
            case.prompts_from = ", ".join(named) or "[producer]"
        except DraftfleetError as error:
            yield of_error("data", error)
            return
    if case.prompts:
        yield ok("data", f"{len(case.prompts)} prompts from {case.prompts_from}", prompts=len(case.prompts))
    elif case.run is None:
        yield warning(
            "data",
            "producer.data is not set: the canary asks a question of its own instead of your prompts",
            "`draftfleet doctor DATA`, the file or data set that will be produced",
        )
    else:
        yield skipped("data", f"run {case.run.name} has no prompt yet: the canary asks a question of its own")


def _names_data(case: Case) -> bool:
    knobs = case.settings.producer
    return bool(knobs.data or knobs.preset or knobs.sources)


def _of_shards(run: Run) -> list[Prompt]:
    found: list[Prompt] = []
    for batch in run.batches():
        found += run.read_prompts(batch)
        if len(found) >= PROMPTS:
            break
    return found[:PROMPTS]


def compare(case: Case) -> Iterator[Finding]:
    """What `produce` would refuse, and where this node differs from the fleet. After the tokenizer is there."""
    if case.run is None:
        yield skipped("settings of the run", "it is new: these settings will be its own")
        return
    yield from _pinned(case, case.run)
    yield from _fleet(case, case.run)


def _pinned(case: Case, run: Run) -> Iterator[Finding]:
    if case.pins is None:
        yield skipped("settings of the run", "no producer is installed here that could say what it would pin")
        return
    content, unpinned = case.pins(case.settings)
    pinned = run.info.content.get("target.fingerprint")
    if pinned is None or content.get("target.fingerprint") is None:  # unknown on one side, as `produce` sees it
        content["target.fingerprint"] = pinned
    differences = [line.strip() for line in run.info.differences(content, unpinned)]
    if differences:
        yield fault(
            "settings of the run",
            f"{run.name} exists with other settings, and `draftfleet produce` would refuse: {'; '.join(differences)}",
            "set these back, or begin another run: `--run NAME`",
            differences=differences,
        )
    else:
        yield ok("settings of the run", f"the same as {run.name} pins")


def _fleet(case: Case, run: Run) -> Iterator[Finding]:
    try:
        sections = fleet.read(run.storage, run.name)
    except (RunMissing, CorruptFile) as error:
        yield of_error("fleet", error, level="warning")
        return
    differs = [
        f"{section}.{key}: the fleet has {theirs}, this node {ours}"
        for section, key, theirs in _agreed(sections)
        if (ours := _own(case, section, key)) != theirs
    ]
    if differs:
        yield warning(
            "fleet",
            f"this node differs from what {run.name}'s producer told the fleet: {'; '.join(differs)}",
            "`draftfleet join STORAGE` takes over the fleet's settings",
            differences=differs,
        )
    else:
        yield ok("fleet", "this node has the settings of the fleet")


def _agreed(sections: fleet.Sections) -> Iterator[tuple[str, str, Any]]:
    """What has to be the same on all nodes. Paths need not, and what decides the samples is pinned by the run."""
    for section, values in sections.items():
        for key, theirs in values.items():
            if section == "queue" and key == "url":
                yield section, key, connection.shown(str(theirs))
            elif section == "claims" or (section, key) == ("target", "model"):
                yield section, key, theirs


def _own(case: Case, section: str, key: str) -> Any:
    if section == "target":
        return case.settings.model
    if section == "queue":
        return connection.shown(connection.address(case.settings))
    return getattr(case.settings.claims, key, None)
