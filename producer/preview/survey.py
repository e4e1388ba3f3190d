"""One pass over the data set: what each line is, what the prompts look like. Ids and counts are kept, never texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from draftfleet.errors import CorruptFile, RunMissing, StorageError
from draftfleet.names import Split, batch_id
from draftfleet.records import Conversation, Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import Storage
from producer.batches import first_asked
from producer.ids import Held, read_held
from producer.ledger import Ledger, Overlap
from producer.produce import UNPINNED, content_of
from producer.reading import Reading

TEXTS_AT_ONCE = 1024
"""Prompts whose last turns are hashed together."""


@dataclass(slots=True)
class SourceCounts:
    """As of the whole. `ended` is false where not all was read, since another source of the mixture had ended."""

    lines: int = 0
    prompts: int = 0
    duplicates: int = 0
    malformed: int = 0
    rejected: int = 0
    train: int = 0
    heldout: int = 0
    ended: bool = True


@dataclass(slots=True, kw_only=True)
class Survey:
    """`lines` = `prompts` + `duplicates` + `malformed` + `rejected`, and `prompts` = `new` + `already`.

    `answers` are what the new prompts ask for: one each, or one for each assistant turn. `turns` counts prompts by
    their user turns. `examples` is one line for each kind of fault.
    """

    source: str
    lines: int = 0
    prompts: int = 0
    new: int = 0
    already: int = 0
    duplicates: int = 0
    malformed: int = 0
    rejected: int = 0
    rejected_for: dict[str, int] = field(default_factory=dict[str, int])
    examples: dict[str, str] = field(default_factory=dict[str, str])
    train: int = 0
    heldout: int = 0
    overlap: int = 0
    answers: int = 0
    turns: dict[int, int] = field(default_factory=dict[int, int])
    with_system: int = 0
    with_tools: int = 0
    with_tool_calls: int = 0
    sources: dict[str, SourceCounts] = field(default_factory=dict[str, SourceCounts])


def answers(messages: Conversation) -> list[range]:
    """Where the assistant's turns stand. Consecutive messages are one; before the first user turn there is none."""
    found: list[range] = []
    has_user = False
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and has_user:
            if found and found[-1].stop == number:
                found[-1] = range(found[-1].start, number + 1)
            else:
                found.append(range(number, number + 1))
        has_user = has_user or message["role"] == "user"
    return found


def survey(reading: Reading, run: Run | None, *, every_turn: bool, each: Callable[[Prompt], None]) -> Survey:
    """Read to the end. `each` is told of every distinct prompt."""
    found = Survey(source=reading.source.name, sources={part.name: SourceCounts() for part in reading.parts})
    ledger, overlap = Ledger(), Overlap()
    if run is not None:
        for held, _ in read_held(run, first_asked(run.batches())):
            ledger.hold(held)
            overlap.add(held)
    waiting: dict[Split, list[Prompt]] = {"train": [], "heldout": []}
    turns = Counter[int]()
    for prompt, is_new in _distinct(reading, ledger):
        if is_new:
            found.answers += 1 + (len(answers(prompt.messages)) if every_turn else 0)
            waiting[prompt.split].append(prompt)
            if len(waiting[prompt.split]) == TEXTS_AT_ONCE:
                _hash(overlap, prompt.split, waiting)
        turns[sum(message["role"] == "user" for message in prompt.messages)] += 1
        found.with_system += any(message["role"] == "system" for message in prompt.messages)
        found.with_tools += bool(prompt.tools)
        found.with_tool_calls += any(message.get("tool_calls") for message in prompt.messages)
        counts = found.sources[prompt.source]
        counts.prompts += 1
        counts.train += prompt.split == "train"
        counts.heldout += prompt.split == "heldout"
        each(prompt)
    for split in waiting:
        _hash(overlap, split, waiting)
    found.lines, found.malformed = reading.lines, reading.malformed
    found.rejected_for = dict(sorted(reading.rejected.items()))
    found.rejected, found.examples = reading.rejected.total(), dict(reading.examples)
    found.new, found.already, found.duplicates = ledger.new, ledger.already, ledger.duplicates + reading.duplicates
    found.prompts = ledger.new + ledger.already
    found.train, found.heldout = ledger.pass_splits["train"], ledger.pass_splits["heldout"]
    for part in reading.parts:
        counts = found.sources[part.name]
        counts.lines, counts.malformed, counts.rejected = part.lines, part.malformed, part.rejected.total()
        counts.duplicates = ledger.by_source[part.name]["duplicates"] + part.duplicates
        counts.ended = part.has_ended
    found.overlap, found.turns = overlap.count(), dict(sorted(turns.items()))
    return found


def _distinct(reading: Reading, ledger: Ledger) -> Iterator[tuple[Prompt, bool]]:
    """Each prompt once, and whether the run lacks it."""
    for prompt in reading:
        before = ledger.duplicates
        is_new = ledger.meet(prompt)
        if ledger.duplicates == before:
            yield prompt, is_new


def _hash(overlap: Overlap, split: Split, waiting: dict[Split, list[Prompt]]) -> None:
    overlap.add(Held.of(batch_id(split, 0), waiting[split]))
    waiting[split] = []


def existing_run(storage: Storage, settings: Settings) -> tuple[Run | None, list[str]]:
    """The run that would be added to, and what would keep `produce` from it."""
    try:
        if not storage.exists(f"{settings.run}/run.json"):
            return None, []
        run = Run.open(storage, settings.run)
    except RunMissing as error:  # it is being deleted
        return None, [f"produce would refuse: {error}"]
    except (StorageError, CorruptFile) as error:
        return None, [f"the storage cannot be read, so all prompts count as new: {error}"]
    content = content_of(settings)
    pinned = run.info.content.get("target.fingerprint")
    if pinned is None or content["target.fingerprint"] is None:
        content["target.fingerprint"] = pinned
    differences = run.info.differences(content, UNPINNED)
    if differences:
        return run, [f"produce would refuse: run {run.name} exists with other settings:\n" + "\n".join(differences)]
    return run, []
