"""What a run asks for, row by row, and who answers it: kept in a temporary database on disk, not in memory.

A slot is a row of a batch that a sample is owed to. It is found by each of its keys: its row key, the id of its prompt,
what is asked of it (the conversation without the source's answer), and the token ids of that.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from draftfleet.errors import CorruptFile
from draftfleet.names import is_again, parts_of
from draftfleet.records import Conversation, Prompt, Sample, prompt_id
from draftfleet.runs import Run
from producer.import_data.responses import without_answers

SCHEMA = """
CREATE TABLE slots (slot INTEGER PRIMARY KEY, batch INTEGER, part INTEGER, state INTEGER, prompt BLOB);
CREATE TABLE keys (key BLOB, slot INTEGER);
CREATE TABLE samples (slot INTEGER PRIMARY KEY, sample BLOB);
CREATE TABLE finished (row_key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE answers (answer BLOB PRIMARY KEY, before INTEGER) WITHOUT ROWID;
"""
INDEX = "CREATE INDEX IF NOT EXISTS by_key ON keys (key)"
"""Made once the keys are there: that is faster than keeping it up."""
FREE, DONE, TAKEN = 0, 1, 2

Place = Literal["imported", "already", "surplus"]


@dataclass(frozen=True, slots=True)
class Slot:
    number: int
    batch: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Filled:
    """A batch with rows to import. `parts` are their places in it; `files` the partials with others of its rows.

    `is_whole`: with those, every row of the batch is there.
    """

    batch: str
    is_split: bool
    num_rows: int
    parts: list[int]
    samples: list[Sample]
    files: list[str]


class Slots:
    """Of one run, as it is when they are read. Made by `read`, and closed with `close`: then its database is gone."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.answers_all_turns = run.info.content.get("producer.turns") == "all"
        # The empty name is a file that only this connection knows, deleted at once; TMPDIR says where.
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-65536;" + SCHEMA)
        self._db.execute("BEGIN")
        self._batches: list[str] = []
        self._sizes: list[int] = []
        self._split: set[str] = set()
        self._partials: dict[str, list[str]] = defaultdict(list)
        self._answers_read: set[str] = set()
        self._has_ids = False

    def close(self) -> None:
        self._db.close()

    # -- what is asked

    def read(self, step: Callable[[], object]) -> list[str]:
        """Read all prompts of the run. `step` is told of each batch. Returns what could not be read, in words."""
        self._read_partials()
        done = set(self.run.done())
        self._split = set(self.run.split_sizes())
        faults: list[str] = []
        batches = sorted(self.run.batches(), key=lambda name: (is_again(name), name))
        for batch in batches:
            if is_again(batch):
                self._db.execute(INDEX)
            try:
                self._add(batch, self.run.read_prompts(batch), done)
            except (CorruptFile, FileNotFoundError) as error:
                faults.append(str(error))
            step()
        self._db.execute(INDEX)
        return faults

    def index_prompt_ids(self, prompt_ids: Callable[[Prompt], list[int] | None], step: Callable[[], object]) -> None:
        """Let slots be found by the token ids of their prompts, too: once, for the first response that needs it."""
        if self._has_ids:
            return
        self._has_ids = True
        for number, raw in self._db.execute("SELECT slot, prompt FROM slots ORDER BY slot").fetchall():
            ids = prompt_ids(_prompt(raw))
            if ids is not None:
                self._db.execute("INSERT INTO keys VALUES (?, ?)", (key_of_ids(ids), number))
            step()

    @property
    def num_slots(self) -> int:
        return self._count("SELECT count(*) FROM slots")

    @property
    def num_free(self) -> int:
        return self._count("SELECT count(*) FROM slots WHERE state = 0")

    def asked_key(self, messages: Conversation, tools: list[dict[str, object]] | None) -> bytes:
        """Of what is asked, whoever answers."""
        asked = without_answers(messages) if self.answers_all_turns else messages
        return bytes.fromhex(prompt_id(asked, tools))

    # -- who answers

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The slots of the first of these keys that has any, in the order of the run."""
        for key in keys:
            found = self._db.execute("SELECT slot FROM keys WHERE key = ? ORDER BY slot", (key,)).fetchall()
            if found:
                return [number for (number,) in found]
        return []

    def free(self, found: list[int], answer: object) -> Slot | Place:
        """The first of these slots that nobody has filled; or why there is none for this answer.

        Of a prompt that is asked several times, the same text fills one slot only: so the same file, read twice, adds
        nothing.
        """
        states = [self._count("SELECT state FROM slots WHERE slot = ?", number) for number in found]
        if len(found) > 1:
            for number, state in zip(found, states, strict=True):
                if state == DONE:
                    self._read_answers(number)
            said = self._db.execute("SELECT before FROM answers WHERE answer = ?", (self._answer(found, answer),))
            if (row := said.fetchone()) is not None:
                return "already" if row[0] else "surplus"
        for number, state in zip(found, states, strict=True):
            if state == FREE:
                batch, raw = self._db.execute("SELECT batch, prompt FROM slots WHERE slot = ?", (number,)).fetchone()
                return Slot(number, self._batches[batch], _prompt(raw))
        return "surplus" if TAKEN in states else "already"

    def fill(self, slot: Slot, found: list[int], answer: object, sample: Sample) -> None:
        self._db.execute("UPDATE slots SET state = ? WHERE slot = ?", (TAKEN, slot.number))
        raw = zlib.compress(sample.to_json().encode(), 1)
        self._db.execute("INSERT INTO samples VALUES (?, ?)", (slot.number, raw))
        if len(found) > 1:
            self._db.execute("INSERT OR IGNORE INTO answers VALUES (?, 0)", (self._answer(found, answer),))

    def filled(self) -> Iterator[Filled]:
        """Batch by batch, in the order of the run."""
        batch, parts, samples = -1, list[int](), list[Sample]()
        cursor = self._db.cursor().execute(
            "SELECT batch, part, sample FROM samples JOIN slots USING (slot) ORDER BY samples.slot"
        )
        for number, part, raw in cursor:
            if number != batch and parts:
                yield self._filled(batch, parts, samples)
                parts, samples = [], []
            batch = number
            parts.append(part)
            samples.append(Sample.from_json(zlib.decompress(raw).decode()))
        if parts:
            yield self._filled(batch, parts, samples)

    @property
    def num_filled_batches(self) -> int:
        return self._count("SELECT count(DISTINCT batch) FROM samples JOIN slots USING (slot)")

    def _filled(self, number: int, parts: list[int], samples: list[Sample]) -> Filled:
        name = self._batches[number]
        return Filled(name, name in self._split, self._sizes[number], parts, samples, self._partials[name])

    def _add(self, batch: str, prompts: list[Prompt], done: set[str]) -> None:
        number = len(self._batches)
        self._batches.append(batch)
        parts = parts_of(batch, len(prompts)) if batch in self._split else [batch] * len(prompts)
        first = {prompt.row_key: part for part, prompt in reversed(list(enumerate(prompts)))}
        self._sizes.append(len(first))
        for part, prompt in enumerate(prompts):
            row_key = key_of(prompt.row_key)
            if first[prompt.row_key] != part:
                continue
            if is_again(batch):  # it is asked here from now on
                self._forget(row_key)
            is_finished = self._count("SELECT count(*) FROM finished WHERE row_key = ?", row_key)
            state = DONE if batch in done or parts[part] in done or is_finished else FREE
            raw = zlib.compress(prompt.to_json().encode(), 1)
            added = self._db.execute(
                "INSERT INTO slots (batch, part, state, prompt) VALUES (?, ?, ?, ?)", (number, part, state, raw)
            )
            names = {row_key, bytes.fromhex(prompt.prompt_id), self.asked_key(prompt.messages, prompt.tools)}
            self._db.executemany("INSERT INTO keys VALUES (?, ?)", [(name, added.lastrowid) for name in names])

    def _forget(self, row_key: bytes) -> None:
        for (slot,) in self._db.execute("SELECT slot FROM keys WHERE key = ?", (row_key,)).fetchall():
            self._db.execute("DELETE FROM slots WHERE slot = ?", (slot,))
            self._db.execute("DELETE FROM keys WHERE slot = ?", (slot,))

    def _read_partials(self) -> None:
        """Rows that are finished, of batches that are not."""
        for name in self.run.partials():
            samples = self.run.read_partial(name)
            for batch in {sample.batch.partition(".")[0] for sample in samples}:
                self._partials[batch].append(name)
            for sample in samples:
                self._db.execute("INSERT OR IGNORE INTO finished VALUES (?)", (key_of(sample.row_key),))
                self._remember(sample)

    def _read_answers(self, number: int) -> None:
        """What stands in the shard of a slot, so that it is not taken for another answer."""
        batch, part = self._db.execute("SELECT batch, part FROM slots WHERE slot = ?", (number,)).fetchone()
        name = self._batches[batch]
        for shard in (name, *([parts_of(name, self._sizes[batch])[part]] if name in self._split else [])):
            if shard in self._answers_read:
                continue
            self._answers_read.add(shard)
            try:
                samples = self.run.read_samples(shard)
            except (CorruptFile, FileNotFoundError):  # a partial, then; or nobody can say
                continue
            for sample in samples:
                self._remember(sample)

    def _remember(self, sample: Sample) -> None:
        key = self.asked_key(sample.messages, sample.tools)
        answer = _hash(key + _said([sample.reasoning, sample.content, sample.tool_calls]))
        self._db.execute("INSERT OR IGNORE INTO answers VALUES (?, 1)", (answer,))

    def _answer(self, found: list[int], answer: object) -> bytes:
        [raw] = self._db.execute("SELECT prompt FROM slots WHERE slot = ?", (found[0],)).fetchone()
        prompt = _prompt(raw)
        return _hash(self.asked_key(prompt.messages, prompt.tools) + _said(answer))

    def _count(self, query: str, *values: object) -> int:
        return int(self._db.execute(query, values).fetchone()[0])


def key_of(name: str) -> bytes:
    return _hash(name.encode(errors="surrogatepass"))


def key_of_ids(ids: list[int]) -> bytes:
    return _hash(b"ids" + json.dumps(ids).encode())


def _said(answer: object) -> bytes:
    return json.dumps(answer, sort_keys=True).encode()


def _hash(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _prompt(raw: bytes) -> Prompt:
    return Prompt.from_json(zlib.decompress(raw).decode())
