"""Rows a second and memory for reading a data set, beside plain iteration by `datasets` over the same files.

    python benchmarks/reading.py
    python benchmarks/reading.py --gb 0.1 --repetitions 1      a quick look
    python benchmarks/reading.py --gb 0.1 --profile            where ours spends its time, by cProfile

Writes one data set of conversations (three to five messages, about 2 kB a row) as JSON Lines, the same gzipped, and as
Parquet, into a temporary folder that is removed at the end: less than three times `--gb` on disk. Each file is read by
each reader in a process of its own, in turns, so that the load of the machine falls on all of them alike.

    draftfleet         open_source + Reading: rows are checked, normalised and given their ids, as `produce` reads them
    draftfleet, rows   open_source alone: rows as they lie there, which is what `datasets` gives
    datasets           load_dataset("json" or "parquet", streaming=True), iterated

The clock runs from opening the file to the last row; imports are left out. Memory is the most that the process ever
held, imports included, and beside it what it held before it opened the file.
"""

from __future__ import annotations

import argparse
import cProfile
import gzip
import itertools
import json
import os
import platform
import pstats
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from draftfleet.settings import Producer
from producer.reading import Reading
from producer.sources import open_source

TEXT = (
    "the a of to and in is that it for on with as was at by this be from are which one you how why when river engine "
    "garden number history language machine light winter market answer question simple explain compare between method "
    "result water music city paper small large first second reason example teacher student write list naïve café"
)
WORDS = TEXT.split()
SENTENCES = 20_000
ROLES = ("user", "assistant")
KINDS = {"jsonl": "JSON Lines", "jsonl.gz": "JSON Lines, gzip", "parquet": "Parquet"}
WRITE_ROWS = 4096
CLEARED_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One reading of one file. Memory in MB."""

    kind: str
    reader: str
    rows: int
    seconds: float
    cpu_s: float
    before_mb: float
    peak_mb: float
    load: float = 0.0

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the JSON Lines file")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--kind", action="append", choices=KINDS, help="unset: all")
    parser.add_argument("--reader", action="append", choices=READERS, help="unset: all")
    parser.add_argument("--profile", action="store_true", help="one reading of each kind by draftfleet, profiled")
    parser.add_argument("--folder", type=Path, help="where the files are written; unset: the system's")
    parser.add_argument("--read", nargs=2, metavar=("READER", "FILE"), help=argparse.SUPPRESS)
    knobs = parser.parse_args()
    if knobs.read:
        print(json.dumps(asdict(_figure(*knobs.read))))
        return
    free = shutil.disk_usage(knobs.folder or tempfile.gettempdir()).free
    if free < 4e9 * knobs.gb:
        raise SystemExit(
            f"{free / 1e9:.1f} GB are free, {4 * knobs.gb:.1f} are wanted: give --folder, or a smaller --gb"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the files are removed then, too
    with tempfile.TemporaryDirectory(prefix="draftfleet-reading-", dir=knobs.folder) as name:
        paths = _write(Path(name), int(knobs.gb * 1e9), knobs.kind or list(KINDS))
        if knobs.profile:
            for path in paths.values():
                _profile(path)
            return
        figures = list(_measured(paths, knobs.reader or list(READERS), knobs.repetitions, Path(name)))
        sizes = {kind: path.stat().st_size for kind, path in paths.items()}
    _print(figures, sizes)


def _write(folder: Path, num_bytes: int, kinds: list[str]) -> dict[str, Path]:
    """The same rows in each kind of file."""
    paths = {kind: folder / f"rows.{kind}" for kind in KINDS}
    written = 0
    with paths["jsonl"].open("wb") as plain:
        for row in _rows():
            line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
            plain.write(line)
            written += len(line)
            if written >= num_bytes:
                break
    if "jsonl.gz" in kinds:
        with paths["jsonl"].open("rb") as plain, gzip.open(paths["jsonl.gz"], "wb", compresslevel=3) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
    if "parquet" in kinds:
        _write_parquet(paths["jsonl"], paths["parquet"])
    return {kind: paths[kind] for kind in kinds}


def _rows() -> Iterator[dict[str, Any]]:
    dice = random.Random(0)
    sentences = [" ".join(dice.choices(WORDS, k=dice.randint(8, 20))) + "." for _ in range(SENTENCES)]
    for number in itertools.count():
        messages = [{"role": "system", "content": "Answer in full sentences."}] if number % 3 == 0 else []
        for turn in range(dice.choice((3, 4)) if messages else dice.choice((3, 5))):
            text = "\n".join(dice.choices(sentences, k=dice.randint(2, 5) if turn % 2 == 0 else dice.randint(5, 12)))
            messages.append({"role": ROLES[turn % 2], "content": text})
        yield {"id": f"row-{number}", "messages": messages, "score": dice.random()}


def _write_parquet(lines: Path, path: Path) -> None:
    writer: pq.ParquetWriter | None = None
    with lines.open("rb") as file:
        while rows := [json.loads(line) for line in itertools.islice(file, WRITE_ROWS)]:
            table = pa.Table.from_pylist(rows)
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    assert writer is not None
    writer.close()


def _measured(paths: dict[str, Path], readers: list[str], repetitions: int, cache: Path) -> Iterator[Figure]:
    """Readers alternate, and change who is first: what else the machine does falls on all of them."""
    for repetition in range(repetitions):
        for path in paths.values():
            order = readers if repetition % 2 == 0 else readers[::-1]
            for reader in order:
                command = [sys.executable, __file__, "--read", reader, str(path)]
                environment = os.environ | CLEARED_ENVIRONMENT | {"HF_HOME": str(cache / "hf")}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                figure = Figure(**json.loads(done.stdout.splitlines()[-1]) | {"load": os.getloadavg()[0]})
                print(json.dumps(asdict(figure)), file=sys.stderr, flush=True)
                yield figure


def _figure(reader: str, file: str) -> Figure:
    """Of this process, which has read nothing before."""
    path = Path(file)
    kind = next(kind for kind in sorted(KINDS, key=len, reverse=True) if path.name.endswith(kind))
    begin = READERS[reader](path, kind)
    process = psutil.Process()
    before_mb, cpu = process.memory_info().rss / 1e6, sum(process.cpu_times()[:2])
    started = time.perf_counter()
    rows = sum(1 for _ in begin())
    seconds = time.perf_counter() - started
    peak_mb = _peak_mb()
    return Figure(kind, reader, rows, seconds, sum(process.cpu_times()[:2]) - cpu, before_mb, peak_mb)


def _peak_mb() -> float:
    """The high-water mark of this process alone: `ru_maxrss` begins with what its parent held before the exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


Begin = Callable[[], Iterable[object]]


def _prompts(path: Path, _: str) -> Begin:
    knobs = Producer(data=str(path))
    return lambda: Reading(open_source(knobs), knobs)


def _lines(path: Path, _: str) -> Begin:
    return lambda: open_source(Producer(data=str(path))).lines({"messages"})


def _datasets(path: Path, kind: str) -> Begin:
    from datasets import load_dataset  # noqa: PLC0415  outside of the clock, and of our own memory

    builder = "parquet" if kind == "parquet" else "json"

    def begin() -> Iterable[object]:
        return load_dataset(builder, data_files=str(path), split="train", streaming=True)

    return begin


READERS: dict[str, Callable[[Path, str], Begin]] = {
    "draftfleet": _prompts,
    "draftfleet, rows": _lines,
    "datasets": _datasets,
}


def _profile(path: Path) -> None:
    knobs = Producer(data=str(path))
    profile = cProfile.Profile()
    profile.enable()
    rows = sum(1 for _ in Reading(open_source(knobs), knobs))
    profile.disable()
    print(f"{path.name}: {rows:,} rows")
    pstats.Stats(profile).sort_stats("tottime").print_stats(20)


def _print(figures: list[Figure], sizes: dict[str, int]) -> None:
    """Medians over the repetitions; the ratio is taken repetition by repetition, against `datasets`."""
    loads = [figure.load for figure in figures]
    print(f"\npython {platform.python_version()}, {os.cpu_count()} cores, load {min(loads):.1f} to {max(loads):.1f}\n")
    print("| file | MB | reader | rows/s | of datasets | CPU µs a row | before, MB | peak, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, size in sizes.items():
        beside = [one.rows_per_s for one in figures if (one.kind, one.reader) == (kind, "datasets")]
        for reader in READERS:
            own = [one for one in figures if (one.kind, one.reader) == (kind, reader)]
            if not own:
                continue
            rates = [one.rows_per_s for one in own]
            ratios = [rate / other for rate, other in zip(rates, beside, strict=False)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""
            cpu_us = statistics.median(1e6 * one.cpu_s / one.rows for one in own)
            memory = f"{max(one.before_mb for one in own):.0f} | {max(one.peak_mb for one in own):.0f}"
            rate = f"{statistics.median(rates):,.0f}"
            print(f"| {KINDS[kind]} | {size / 1e6:,.0f} | {reader} | {rate} | {ratio} | {cpu_us:.0f} | {memory} |")
    rows = {one.rows for one in figures}
    assert len(rows) == 1, f"the readers did not read the same rows: {rows}"
    print("\n" + json.dumps([asdict(figure) for figure in figures]))


if __name__ == "__main__":
    main()
