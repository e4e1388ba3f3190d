"""A run: one collection under one name, a folder in the storage. The one place that knows its paths.

    RUN/run.json                         what the run pins, and where it came from
        sealed.json                      the producer is finished: the totals
        prompts/train-000000.jsonl.gz    prompt shard of one batch; immutable
        samples/train-000000.parquet     sample shard of the same batch; its existence means done; immutable
        partial/PROCESS-000012.jsonl     finished rows of batches still at work
        split/train-000000.json          the batch goes on as single rows: train-000000.0000, train-000000.0001, ...
        dead/train-000000.0007.json       a row that is given up, with its error
        corrupt/                         shards that could not be read, moved aside
        drafters/NAME/                   checkpoints, logs, evaluation, exported folders of one drafter

A batch holds prompts of one split, which its id begins with.
"""

from __future__ import annotations

import gzip
import io
import json
import time
import uuid
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

import draftfleet
from draftfleet.errors import CorruptFile, RunConflict, RunMissing
from draftfleet.names import parent_of, parts_of
from draftfleet.outcomes import Counts
from draftfleet.records import SAMPLE_SCHEMA, SCHEMA_VERSION, Prompt, Sample
from draftfleet.storage import Storage

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """run.json. `content` is pinned: a resume with other content is refused. `provenance` says where it came from."""

    run: str
    run_id: str
    schema_version: int
    product_version: str
    created_at: float
    content: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])


class Run:
    """An existing run. Made by `create` or `open`."""

    def __init__(self, storage: Storage, info: RunInfo) -> None:
        self.storage = storage
        self.info = info
        self.name = info.run
        self.run_id = info.run_id

    @classmethod
    def create(cls, storage: Storage, name: str, content: dict[str, Any], provenance: dict[str, Any]) -> Self:
        """Make the run, or open it if it exists with the same content.

        Raises RunConflict, naming each difference, if it exists with other content.
        """
        info = RunInfo(
            run=name,
            run_id=uuid.uuid4().hex,
            schema_version=SCHEMA_VERSION,
            product_version=draftfleet.__version__,
            created_at=time.time(),
            content=content,
            provenance=provenance,
        )
        if storage.put_if_absent(f"{name}/run.json", _json(asdict(info))):
            return cls(storage, info)
        run = cls.open(storage, name)
        differences = [
            f"  {key}: the run has {run.info.content.get(key)!r}, now {content.get(key)!r}"
            for key in sorted(run.info.content.keys() | content.keys())
            if run.info.content.get(key) != content.get(key)
        ]
        if differences:
            raise RunConflict(
                f"run {name} exists with other settings:\n" + "\n".join(differences) + "\n"
                "Samples of one run must be comparable: use these settings, or another run name."
            )
        return run

    @classmethod
    def open(cls, storage: Storage, name: str) -> Self:
        """Raises RunMissing, or CorruptFile."""
        try:
            raw = storage.read(f"{name}/run.json")
        except FileNotFoundError:
            raise RunMissing(
                f"run {name} is not in {storage.url}: make it with `draftfleet produce --run {name}`, "
                "or point storage.url at the folder that holds it."
            ) from None
        try:
            info = RunInfo(**json.loads(raw))
            if info.run != name:  # its files would be looked for in that other folder
                raise ValueError(f"it is of run {info.run!r}")
            return cls(storage, info)
        except (ValueError, TypeError) as error:
            raise CorruptFile(f"{storage.url}/{name}/run.json is not a run: {error}. Restore it from a copy.") from None

    # -- prompts

    def write_prompts(self, batch: str, prompts: Iterable[Prompt]) -> bool:
        """True if this call wrote the shard; False if it was there."""
        lines = "".join(prompt.to_json() + "\n" for prompt in prompts)
        return self.storage.put_if_absent(self._prompts(batch), gzip.compress(lines.encode(), mtime=0))

    def read_prompts(self, batch: str) -> list[Prompt]:
        """The prompts of a batch, one for a batch that was split off. Raises FileNotFoundError or CorruptFile."""
        parent, row = parent_of(batch)
        prompts = self._parsed(self._prompts(parent), _prompts_in)
        if row is None:
            return prompts
        if row >= len(prompts):
            raise FileNotFoundError(f"{batch} is no row of {parent}, which has {len(prompts)}")
        return [prompts[row]]

    def batches(self) -> list[str]:
        """Ids of the batches that the producer made, in order."""
        suffix = ".jsonl.gz"
        return sorted(
            name.removesuffix(suffix) for name in self.storage.list(f"{self.name}/prompts") if name.endswith(suffix)
        )

    def work(self) -> list[str]:
        """Ids of the batches to be done: those that were split stand as their single rows."""
        split = self.split_sizes()
        return [part for batch in self.batches() for part in parts_of(batch, split.get(batch))]

    def outstanding(self, done: Iterable[str] | None = None, dead: Iterable[str] | None = None) -> list[str]:
        """Ids of the batches still to be done: no shard of their own or of the batch they were split from, not dead.

        Who counts the others too gives what it read of them: a batch that is done meanwhile is then counted once.
        """
        done = set(self.done() if done is None else done)
        dead = set(self.dead() if dead is None else dead)
        return [
            part for part in self.work() if part not in done and part not in dead and parent_of(part)[0] not in done
        ]

    # -- samples

    def commit(self, batch: str, samples: list[Sample]) -> bool:
        """Put the sample shard of a batch. True if this call put it; False if another attempt was first."""
        counts = Counts.of(samples)
        table = pa.Table.from_pylist([sample.to_row() for sample in samples], SAMPLE_SCHEMA)
        footer = {"draftfleet.counts": json.dumps(asdict(counts)), "draftfleet.run_id": self.run_id}
        sink = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(footer), sink, compression="zstd")
        return self.storage.put_if_absent(self._samples(batch), sink.getvalue())

    def is_done(self, batch: str) -> bool:
        return self.storage.exists(self._samples(batch))

    def done(self) -> list[str]:
        """Ids of the batches whose shard exists, in order."""
        suffix = ".parquet"
        return sorted(
            name.removesuffix(suffix) for name in self.storage.list(f"{self.name}/samples") if name.endswith(suffix)
        )

    def counts(self, batch: str) -> Counts:
        """What a shard holds, from its footer alone. Raises CorruptFile."""
        with self._reading(batch) as raw:
            metadata = pq.read_schema(raw).metadata or {}
            return Counts(**json.loads(metadata[b"draftfleet.counts"]))

    def read_samples(self, batch: str) -> list[Sample]:
        """Raises FileNotFoundError or CorruptFile."""
        with self._reading(batch) as raw:
            rows = pq.read_table(raw).to_pylist()
            return [Sample.from_row(cast(dict[str, Any], row)) for row in rows]

    def set_aside(self, batch: str) -> None:
        """Move a shard that cannot be read to corrupt/, so that its batch is no longer done."""
        self.storage.rename(self._samples(batch), f"{self.name}/corrupt/{batch}-{int(time.time())}.parquet")

    @contextmanager
    def _reading(self, batch: str) -> Generator[io.BytesIO]:
        path = self._samples(batch)
        raw = io.BytesIO(self.storage.read(path))
        try:
            yield raw
        except (pa.ArrowException, ValueError, TypeError, KeyError, OSError) as error:
            raise CorruptFile(
                f"shard {self.storage.url}/{path} cannot be read: {error}. "
                f"`draftfleet status --run {self.name} --repair` moves it aside and has its batch done again."
            ) from None

    # -- partials: finished rows of batches that are not done

    def write_partial(self, process: str, number: int, samples: list[Sample]) -> str:
        """Put one small file of finished rows, tagged with their batch. Returns its name."""
        name = f"{process}-{number:06d}.jsonl"
        lines = "".join(sample.to_json() + "\n" for sample in samples)
        self.storage.put(f"{self.name}/partial/{name}", lines.encode())
        return name

    def partials(self) -> list[str]:
        return sorted(self.storage.list(f"{self.name}/partial"))

    def read_partial(self, name: str) -> list[Sample]:
        """Rows of a partial; a torn line is left out, since its row is only asked again. Nothing if it is gone."""
        try:
            raw = self.storage.read(f"{self.name}/partial/{name}")
        except FileNotFoundError:
            return []
        samples: list[Sample] = []
        for line in _lines(raw.decode(errors="replace")):
            try:
                samples.append(Sample.from_json(line))
            except (ValueError, TypeError):
                continue
        return samples

    def delete_partial(self, name: str) -> None:
        self.storage.delete(f"{self.name}/partial/{name}")

    # -- splits and dead letters

    def split(self, batch: str, num_rows: int) -> bool:
        """Let a batch go on as single rows. True if this call decided it."""
        return self.storage.put_if_absent(f"{self.name}/split/{batch}.json", _json({"rows": num_rows}))

    def split_sizes(self) -> dict[str, int]:
        """The batches that were split, with how many rows each has."""
        names = (name.removesuffix(".json") for name in self.storage.list(f"{self.name}/split"))
        return {name: self._parsed(f"{self.name}/split/{name}.json", _rows_in) for name in names}

    def is_split(self, batch: str) -> bool:
        return self.storage.exists(f"{self.name}/split/{batch}.json")

    def bury(self, batch: str, sample: Sample) -> bool:
        """Give a single row up: `sample` records it as failed, with why. A shard that still comes beats it."""
        return self.storage.put_if_absent(f"{self.name}/dead/{batch}.json", sample.to_json().encode())

    def dead(self) -> dict[str, Sample]:
        """The rows that were given up and have no shard, by batch."""
        names = (name.removesuffix(".json") for name in self.storage.list(f"{self.name}/dead"))
        return {
            name: self._parsed(f"{self.name}/dead/{name}.json", lambda raw: Sample.from_json(raw.decode()))
            for name in names
            if not self.is_done(name)
        }

    def is_dead(self, batch: str) -> bool:
        return self.storage.exists(f"{self.name}/dead/{batch}.json")

    # -- the producer's last word

    def seal(self, totals: dict[str, Any]) -> None:
        self.storage.put(f"{self.name}/sealed.json", _json(totals))

    def unseal(self) -> None:
        self.storage.delete(f"{self.name}/sealed.json")

    def sealed(self) -> dict[str, Any] | None:
        """The totals, once the producer has read its data to the end; None before."""
        try:
            return self._parsed(f"{self.name}/sealed.json", lambda raw: cast(dict[str, Any], json.loads(raw)))
        except FileNotFoundError:
            return None

    # -- drafters

    def drafter_dir(self, drafter: str) -> Path:
        """The folder of a drafter. The trainer needs a real one."""
        return self.storage.local(f"{self.name}/drafters/{drafter}")

    def _parsed(self, path: str, parse: Callable[[bytes], T]) -> T:
        """Raises FileNotFoundError or CorruptFile."""
        raw = self.storage.read(path)
        try:
            return parse(raw)
        except (ValueError, TypeError, KeyError, EOFError, OSError, zlib.error) as error:
            raise CorruptFile(f"{self.storage.url}/{path} cannot be read: {error}. Restore it from a copy.") from None

    def _prompts(self, batch: str) -> str:
        return f"{self.name}/prompts/{batch}.jsonl.gz"

    def _samples(self, batch: str) -> str:
        return f"{self.name}/samples/{batch}.parquet"


def _prompts_in(raw: bytes) -> list[Prompt]:
    return [Prompt.from_json(line) for line in _lines(gzip.decompress(raw).decode())]


def _rows_in(raw: bytes) -> int:
    return int(json.loads(raw)["rows"])


def _lines(text: str) -> list[str]:
    """Not `splitlines`: that also breaks at U+2028 and its like, which JSON leaves inside a text."""
    return [line for line in text.split("\n") if line]


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
