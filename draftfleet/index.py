"""The shard index: one line per shard with its rows, bytes, SHA-256 and counts, so that counting reads no shard.

    RUN/index/PROCESS-000000.jsonl    of one process, put anew as it grows; -000001 follows after 1,000 lines
    {"kind":"samples","batch":"train-000123","rows":64,"bytes":81920,"sha256":"..","written_at":1764516000.123,
     "counts":{"ok":60,"truncated":3,"failed":1,"tokens":118211,"mismatched":0},"crc":".."}

The index is never the truth: the shard is. A line that is missing is read from the shard instead, and filled in later;
a line without its shard means nothing; of two lines for one shard the later one counts. A shard that is moved aside is
retracted by a line without a checksum. `crc` is the line's own: a damaged line is a missing one.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from draftfleet.errors import CorruptFile, NewerFile
from draftfleet.outcomes import Counts
from draftfleet.run_info import is_gone
from draftfleet.shards import counts_in, lines, prompts_in, table_in

if TYPE_CHECKING:
    from draftfleet.runs import Run

Kind = Literal["samples", "prompts"]

LINES_PER_FILE = 1000
READERS = 8
"""Index files read at once: on an object store each is a round trip."""

FILL_S = 5.0
"""Seconds that one look of the reconciler spends on missing lines."""

_LATER_S = 0.001
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_CRC = ',"crc":"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A shard as it was put. `counts` are of samples only. Without `sha256` it says that the shard was moved aside."""

    kind: Kind
    batch: str
    rows: int
    bytes: int
    sha256: str
    written_at: float
    counts: Counts | None = None

    @classmethod
    def of(cls, kind: Kind, batch: str, raw: bytes, rows: int, counts: Counts | None = None) -> Self:
        digest = hashlib.sha256(raw).hexdigest()
        now = round(time.time(), 3)
        return cls(kind=kind, batch=batch, rows=rows, bytes=len(raw), sha256=digest, written_at=now, counts=counts)

    @classmethod
    def retraction(cls, batch: str) -> Self:
        """The sample shard of a batch was moved aside."""
        return cls(kind="samples", batch=batch, rows=0, bytes=0, sha256="", written_at=round(time.time(), 3))

    def same_shard(self, other: Entry) -> bool:
        """Whether both say the same of the shard, whenever they were written."""
        return replace(self, written_at=0) == replace(other, written_at=0)

    def to_line(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "counts"}
        if self.counts is not None:
            fields["counts"] = asdict(self.counts)
        body = _ENCODE(fields)[:-1]
        return f'{body}{_CRC}{zlib.crc32(body.encode()):08x}"}}\n'

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """None if the line is damaged, or of a version that is not understood."""
        body, found, crc = line.rpartition(_CRC)
        if not found or f"{zlib.crc32(body.encode()):08x}" != crc[:8]:
            return None
        try:
            fields: dict[str, Any] = json.loads(body + "}")
            if counts := fields.pop("counts", None):
                fields["counts"] = Counts(**counts)
            return cls(**fields)
        except (ValueError, TypeError):
            return None


class Index:
    """The index of one run as one process reads it, and the lines that it adds. Safe to use from several threads."""

    def __init__(self, run: Run) -> None:
        self._storage = run.storage
        self._run_id = run.run_id
        self._run_name = run.name
        self._folder = f"{run.name}/index"
        self._process = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._entries: dict[Kind, dict[str, Entry]] = {"samples": {}, "prompts": {}}
        self.hosts: dict[str, str] = {}
        """By batch, the node whose line counts of its sample shard: who put the shard, unless the line came later."""
        self._read_bytes: dict[str, int] = {}
        self._lines: list[str] = []
        self._num_put = 0
        self._number = 0

    def add(self, entry: Entry) -> None:
        """Remember a line; `flush` puts it. It counts from now on, whatever the clocks of other nodes say."""
        with self._lock:
            known = self._entries[entry.kind].get(entry.batch)
            if known is not None and known.written_at >= entry.written_at:
                entry = replace(entry, written_at=round(known.written_at + _LATER_S, 3))
            self._lines.append(entry.to_line())
            self._entries[entry.kind][entry.batch] = entry

    def flush(self) -> None:
        """Put what was added since the last time. Raises StorageUnwritable: then nothing is forgotten, ask again.

        Of a run that was deleted meanwhile nothing is put: its folder would be there again, and nobody could name it.
        """
        with self._writing:
            if len(self._lines) != self._num_put and is_gone(self._storage, self._run_name, self._run_id):
                with self._lock:
                    self._lines.clear()
                    self._num_put = 0
            while self._put_a_file():
                pass

    def read(self, kind: Kind = "samples") -> dict[str, Entry]:
        """The lines that count, by batch. A file that was read and did not grow is not read again."""
        sizes = {
            name: size
            for name, size in self._storage.sizes(self._folder).items()
            if not name.startswith(self._process) and self._read_bytes.get(name) != size
        }
        with ThreadPoolExecutor(READERS) as pool:
            files = list(pool.map(self._file, sizes))
        with self._lock:
            for name, raw in zip(sizes, files, strict=True):
                for entry in filter(None, map(Entry.from_line, lines(raw.decode(errors="replace")))):
                    known = self._entries[entry.kind].get(entry.batch)
                    if known is None or known.written_at < entry.written_at:
                        self._entries[entry.kind][entry.batch] = entry
                        if entry.kind == "samples":
                            self.hosts[entry.batch] = name.rsplit("-", 3)[0]
                self._read_bytes[name] = len(raw)
            return {batch: entry for batch, entry in self._entries[kind].items() if entry.sha256}

    def _put_a_file(self) -> bool:
        """Whether another file has to follow."""
        with self._lock:
            here = self._lines[:LINES_PER_FILE]
            if len(here) == self._num_put:
                return False
        self._storage.put(f"{self._folder}/{self._process}-{self._number:06d}.jsonl", "".join(here).encode())
        with self._lock:
            if len(here) < LINES_PER_FILE:
                self._num_put = len(here)
                return False
            del self._lines[:LINES_PER_FILE]
            self._num_put, self._number = 0, self._number + 1
            return bool(self._lines)

    def _file(self, name: str) -> bytes:
        try:
            return self._storage.read(f"{self._folder}/{name}")
        except FileNotFoundError:
            return b""


def sample_entry(batch: str, raw: bytes) -> Entry:
    """The line of a sample shard, from all of it. Raises one of `shards.READ_FAULTS`."""
    return Entry.of("samples", batch, raw, table_in(raw).num_rows, counts_in(raw))


def prompt_entry(batch: str, raw: bytes) -> Entry:
    """The line of a prompt shard. Raises what a damaged one makes gzip and JSON raise."""
    return Entry.of("prompts", batch, raw, len(prompts_in(raw)))


def fill(run: Run, done: Mapping[str, int], limit_s: float = FILL_S) -> bool:
    """Write the lines that are missing or do not fit the shard's size, from the shards. False if time ran out.

    `done` are the sample shards and their sizes. A shard that cannot be read gets no line.
    """
    end = time.monotonic() + limit_s
    samples = run.index.read("samples")
    prompts = run.index.read("prompts")
    missing = [batch for batch, size in done.items() if batch not in samples or samples[batch].bytes != size]
    in_time = _add_each(run, "samples", missing, end)
    in_time = in_time and _add_each(run, "prompts", (one for one in run.batches() if one not in prompts), end)
    run.index.flush()
    return in_time


def _add_each(run: Run, kind: Kind, batches: Iterable[str], end: float) -> bool:
    for batch in batches:
        if time.monotonic() > end:
            return False
        try:
            run.index.add(run.entry(kind, batch))
        except (CorruptFile, NewerFile, FileNotFoundError):
            continue
    return True
