"""A run: one collection under one name, a folder in the storage. The one place that knows its paths.

    RUN/run.json                         what the run pins, and where it came from
        sealed.json                      the producer is finished: the totals
        prompts/train-000000.jsonl.gz    prompt shard of one batch; immutable
        samples/train-000000.parquet     sample shard of the same batch; its existence means done; immutable
        partial/PROCESS-000012.jsonl     finished rows of batches still at work
        imports/NAME.json                what was imported, from which files
        again/train-again-000000.json    which rows this batch asks again (draftfleet.again)
        split/train-000000.json          the batch goes on as single rows: train-000000.0000, train-000000.0001, ...
        dead/train-000000.0007.json       a row that is given up, with its error
        corrupt/                         shards that could not be read, moved aside
        index/PROCESS-000000.jsonl       one line per shard that the process put (draftfleet/index.py)
        history/PROCESS-000000.jsonl     what happened to a worker's node and servers (draftfleet/history.py)
        ids/PROCESS-000000.parquet       the ids in the prompt shards, for the producer (producer/ids.py)
        drafters/NAME/                   checkpoints, logs, evaluation, exported folders of one drafter
        control.json                     paused, cancelled, priority, budget: draftfleet.control
        fleet.json                       what the run's workers agree on: draftfleet.fleet

A batch holds prompts of one split, which its id begins with.
"""

from __future__ import annotations

import difflib
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from draftfleet import index, shards
from draftfleet.errors import CorruptFile, NewerFile, RunConflict, RunMissing, StorageError
from draftfleet.index import Entry, Index, Kind
from draftfleet.names import parent_of, parts_of
from draftfleet.outcomes import Counts
from draftfleet.records import Prompt, Sample
from draftfleet.run_info import RunInfo
from draftfleet.storage import Storage

T = TypeVar("T")

TOMBSTONES = ".deleted"
"""At the root of the storage: RUN_ID.json for each run that is being deleted, or was (draftfleet.deletion)."""


class Run:
    """An existing run. Made by `create` or `open`."""

    def __init__(self, storage: Storage, info: RunInfo) -> None:
        self.storage = storage
        self.info = info
        self.name = info.run
        self.run_id = info.run_id
        self.index = Index(self)
        self.ids_folder = f"{self.name}/ids"

    @classmethod
    def create(
        cls,
        storage: Storage,
        name: str,
        content: dict[str, Any],
        provenance: dict[str, Any],
        unpinned: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make the run, or open it if it exists with the same content. `unpinned`: see RunInfo.differences.

        Raises RunConflict, naming each difference, if it exists with other content.
        """
        info = RunInfo.new(name, content, provenance)
        if storage.put_if_absent(f"{name}/run.json", info.to_json()):
            return cls(storage, info)
        run = cls.open(storage, name)
        if differences := run.info.differences(content, unpinned or {}):
            raise RunConflict(
                f"run {name} exists with other settings:\n" + "\n".join(differences) + "\n"
                "Samples of one run must be comparable: use these settings, or another run name."
            )
        return run

    @classmethod
    def open(cls, storage: Storage, name: str, *, even_deleted: bool = False) -> Self:
        """Raises RunMissing, also where the run is being deleted, unless `even_deleted`; RunNewer or CorruptFile."""
        try:
            raw = storage.read(f"{name}/run.json")
        except FileNotFoundError:
            raise RunMissing(
                f"run {name} is not in {storage.url}{_near(storage, name)}: make it with `draftfleet produce --run "
                f"{name}`, or point storage.url at the folder that holds it."
            ) from None
        try:
            info = RunInfo.from_json(raw)  # RunNewer goes on to who asked
            if info.run != name:  # its files would be looked for in that other folder
                raise ValueError(f"it is of run {info.run!r}")
            run = cls(storage, info)
        except (ValueError, TypeError) as error:
            raise CorruptFile(f"{storage.url}/{name}/run.json is not a run: {error}. Restore it from a copy.") from None
        if not even_deleted and storage.exists(f"{TOMBSTONES}/{run.run_id}.json"):
            raise RunMissing(
                f"run {name} is being deleted: `draftfleet runs delete {name}` goes on with it; then the name is free."
            )
        return run

    # -- prompts

    def write_prompts(self, batch: str, prompts: Sequence[Prompt]) -> bool:
        """True if this call wrote the shard; False if it was there. Its line waits for `index.flush`."""
        raw = shards.pack_prompts(prompts)
        if not self.storage.put_if_absent(self._prompts(batch), raw):
            return False
        self.index.add(Entry.of("prompts", batch, raw, len(prompts)))
        return True

    def write_prompts_of(self, batches: Sequence[tuple[str, Sequence[Prompt]]]) -> int:
        """Write the shards of several batches in order, up to the first that is there. Returns how many."""
        raws = [shards.pack_prompts(prompts) for _, prompts in batches]
        paths = [self._prompts(batch) for batch, _ in batches]
        num_put = self.storage.put_in_order(list(zip(paths, raws, strict=True)))
        for (batch, prompts), raw in list(zip(batches, raws, strict=True))[:num_put]:
            self.index.add(Entry.of("prompts", batch, raw, len(prompts)))
        return num_put

    def read_prompts(self, batch: str) -> list[Prompt]:
        """The prompts of a batch, one for a batch that was split off. Raises FileNotFoundError or CorruptFile."""
        parent, row = parent_of(batch)
        prompts = self._parsed(self._prompts(parent), shards.prompts_in)
        if row is None:
            return prompts
        if row >= len(prompts):
            raise FileNotFoundError(f"{batch} is no row of {parent}, which has {len(prompts)}")
        return [prompts[row]]

    def has_prompts(self, batch: str) -> bool:
        return self.storage.exists(self._prompts(batch))

    def batches(self) -> list[str]:
        """Ids of the batches that the producer made, in order, then of those that ask rows again."""
        return sorted(_without(".jsonl.gz", self.storage.list(f"{self.name}/prompts")))

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
        """Put the sample shard of a batch. True if this call put it; False if another attempt was first.

        Its line in the index waits for `index.flush`.
        """
        counts = Counts.of(samples)
        raw = shards.pack_samples(samples, counts, self.run_id)
        if not self.storage.put_if_absent(self._samples(batch), raw):
            return False
        self.index.add(Entry.of("samples", batch, raw, len(samples), counts))
        return True

    def is_done(self, batch: str) -> bool:
        return self.storage.exists(self._samples(batch))

    def done(self) -> list[str]:
        """Ids of the batches whose shard exists, in order."""
        return sorted(_without(".parquet", self.storage.list(f"{self.name}/samples")))

    def done_bytes(self) -> dict[str, int]:
        """The size of each shard that exists, in order of their batches."""
        sizes = self.storage.sizes(f"{self.name}/samples")
        return {batch: sizes[f"{batch}.parquet"] for batch in sorted(_without(".parquet", sizes))}

    def counts(self, batch: str) -> Counts:
        """What a shard holds, from its footer alone. Raises CorruptFile."""
        return self._sampled(batch, shards.counts_in)

    def read_samples(self, batch: str) -> list[Sample]:
        """Raises FileNotFoundError or CorruptFile."""
        return self._sampled(batch, shards.samples_in)

    def read_shard(self, kind: Kind, batch: str) -> bytes:
        """The shard as it lies there. Raises FileNotFoundError."""
        return self.storage.read(self._samples(batch) if kind == "samples" else self._prompts(batch))

    def entry(self, kind: Kind, batch: str) -> Entry:
        """What the index should say of a shard, read from all of it. Raises FileNotFoundError or CorruptFile."""
        if kind == "samples":
            return self._sampled(batch, lambda raw: index.sample_entry(batch, raw))
        return self._parsed(self._prompts(batch), lambda raw: index.prompt_entry(batch, raw))

    def outcomes(self, batch: str) -> dict[str, Counts]:
        """What became of each row of a shard. Raises FileNotFoundError or CorruptFile."""
        return self._sampled(batch, shards.outcomes_in)

    def columns(self, batch: str, names: Sequence[str]) -> list[dict[str, Any]]:
        """These columns of each row of a shard, as far as it has them. Raises FileNotFoundError or CorruptFile."""
        return self._sampled(batch, lambda raw: shards.columns_in(raw, names))

    def set_aside(self, batch: str) -> None:
        """Move a shard that cannot be read to corrupt/, so that its batch is no longer done.

        Its line is retracted first: should this process end in between, the shard has no line, and not a wrong one.
        """
        self.index.read()
        self.index.add(Entry.retraction(batch))
        self.index.flush()
        self.storage.rename(self._samples(batch), f"{self.name}/corrupt/{batch}-{int(time.time())}.parquet")

    def _sampled(self, batch: str, parse: Callable[[bytes], T]) -> T:
        path = self._samples(batch)
        raw = self.storage.read(path)
        try:
            return parse(raw)
        except NewerFile as error:
            raise NewerFile(f"shard {self.storage.url}/{path}: {error}") from None
        except shards.READ_FAULTS as error:
            raise CorruptFile(
                f"shard {self.storage.url}/{path} cannot be read: {error}. "
                f"`draftfleet verify {self.name} --repair` moves it aside and has its batch done again."
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
        """Rows of a partial; a line that is torn or newer is left out: its row is asked again. Nothing if gone."""
        try:
            raw = self.storage.read(f"{self.name}/partial/{name}")
        except FileNotFoundError:
            return []
        samples: list[Sample] = []
        for line in shards.lines(raw.decode(errors="replace")):
            try:
                samples.append(Sample.from_json(line))
            except (ValueError, TypeError, NewerFile):
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


def _near(storage: Storage, name: str) -> str:
    """`, which has qwen3 and qwen3-thinking`: the runs with the nearest names, else some that are there."""
    try:
        there = sorted(one for one in storage.folders() if not one.startswith("."))
    except StorageError:  # one that may be read and not listed
        return ""
    names = difflib.get_close_matches(name, there, n=3) or there[:3]
    return f", which has {' and '.join(names)}" if names else ", which has no run"


def _rows_in(raw: bytes) -> int:
    return int(json.loads(raw)["rows"])


def _without(suffix: str, names: Iterable[str]) -> list[str]:
    """The names that end so, without that end."""
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
