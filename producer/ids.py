"""The ids in the prompt shards, in a few files that are quickly read: `ids/PROCESS-000000.parquet`.

They are never the truth, the shards are: what is missing here, or cannot be read, is read from the shards.
"""

from __future__ import annotations

import hashlib
import io
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from draftfleet.errors import StorageUnreadable
from draftfleet.logs import event
from draftfleet.names import Split, split_of
from draftfleet.records import Prompt
from draftfleet.runs import Run
from producer.prompts import overlap_text

log = logging.getLogger(__name__)

FILE_BATCHES = 256
"""Batches of one file: as many are at most read from their shards again after a kill -9."""

SCHEMA = pa.schema([("batch", pa.string()), ("prompt_id", pa.binary(16)), ("text", pa.int64())])


@dataclass(frozen=True, slots=True)
class Held:
    """The prompts of one batch, each once however often it is sampled: their ids, and a hash of each last user turn
    without case and punctuation."""

    batch: str
    ids: list[int]
    texts: list[int]

    @classmethod
    def of(cls, batch: str, prompts: Sequence[Prompt]) -> Self:
        first = [prompt for prompt in prompts if prompt.sample == 0]
        return cls(
            batch,
            [int(prompt.prompt_id, 16) for prompt in first],
            [_hash(overlap_text(prompt.messages)) for prompt in first],
        )

    @property
    def split(self) -> Split:
        return split_of(self.batch)


def read_held(run: Run, batches: Sequence[str]) -> Iterator[tuple[Held, bool]]:
    """What the run holds, batch by batch, each once. False beside one that was found in its shard alone."""
    missing = dict.fromkeys(batches)
    for name in sorted(run.storage.list(run.ids_folder)):
        for held in _read(run, name):
            if held.batch in missing:
                del missing[held.batch]
                yield held, True
    for batch in missing:
        yield Held.of(batch, run.read_prompts(batch)), False


class IdFiles:
    """Writes what one pass adds. What is not flushed is only slower to find again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._process = uuid.uuid4().hex[:12]
        self._num_files = 0
        self._waiting: list[Held] = []

    def add(self, held: Held) -> None:
        self._waiting.append(held)
        if len(self._waiting) == FILE_BATCHES:
            self.flush()

    def flush(self) -> None:
        """Put the ids that wait, and the lines of their batches in the shard index."""
        self._run.index.flush()
        if not self._waiting:
            return
        columns = {
            "batch": [held.batch for held in self._waiting for _ in held.ids],
            "prompt_id": [one.to_bytes(16, "big") for held in self._waiting for one in held.ids],
            "text": [text for held in self._waiting for text in held.texts],
        }
        table = pa.table(columns, SCHEMA.with_metadata({"draftfleet.run_id": self._run.run_id}))
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        name = f"{self._process}-{self._num_files:06d}.parquet"
        self._run.storage.put(f"{self._run.ids_folder}/{name}", sink.getvalue())
        self._num_files += 1
        self._waiting = []


def _read(run: Run, name: str) -> list[Held]:
    """The batches of one file; nothing if it cannot be read, or is of a run that had this name before."""
    try:
        raw = io.BytesIO(run.storage.read(f"{run.ids_folder}/{name}"))
        table = pq.read_table(raw, page_checksum_verification=True)
        if (table.schema.metadata or {}).get(b"draftfleet.run_id") != run.run_id.encode():
            return []
        columns: dict[str, list[Any]] = table.cast(SCHEMA).to_pydict()
    except (pa.ArrowException, OSError, ValueError, StorageUnreadable) as error:
        log.warning(event("file of ids not read, the shards are", run=run.name, file=name, error=error))
        return []
    found: dict[str, Held] = {}
    for batch, one, text in zip(columns["batch"], columns["prompt_id"], columns["text"], strict=True):
        held = found.get(batch)
        if held is None:
            held = found[batch] = Held(batch, [], [])
        held.ids.append(int.from_bytes(one, "big"))
        held.texts.append(text)
    return list(found.values())


def _hash(text: str) -> int:
    """The same in every process, unlike `hash`."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
