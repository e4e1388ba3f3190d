"""The storage: whether it takes files the way the fleet needs it, and has room for the run."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Iterator

from draftfleet.errors import StorageError
from draftfleet.storage import FileStorage, Storage, open_storage, probe
from draftfleet.storage.file import PROBED
from workers.doctor import clocks, estimate
from workers.doctor.case import Case
from workers.doctor.findings import Finding, fault, of_error, ok, skipped, warning

WRITES = 5
SLOW_S = 0.5
NEARLY = 0.8
FILES_PER_BATCH = 3
"""Its prompts, its samples, and a partial now and then."""


def look(case: Case) -> Iterator[Finding]:
    try:
        storage = open_storage(case.settings.storage)
        was_there = not isinstance(storage, FileStorage) or storage.root.exists()
        probe(storage)
        if not was_there:
            yield warning(
                "folder",
                f"{storage.url} was not there, and is made",
                "mount its file system, if it should have been one; else this is a new storage",
            )
        yield ok("writes", f"{storage.url} takes a file, reads it back, and refuses to put it twice", url=storage.url)
        yield from _listed(case, storage)
        case.free_bytes = storage.free_bytes()
    except StorageError as error:
        yield of_error("writes", error)


def _listed(case: Case, storage: Storage) -> Iterator[Finding]:
    folder = f"{PROBED}/doctor-{uuid.uuid4().hex}"
    names = [f"file-{number}" for number in range(WRITES)]
    seconds: list[float] = []
    try:
        for name in names:
            begun = time.monotonic()
            storage.put_if_absent(f"{folder}/{name}", b"x" * 1000)
            seconds.append(time.monotonic() - begun)
        before = case.now()
        storage.put(f"{folder}/clock", b"now")
        after = case.now()
        missing = {*names, "clock"} - set(storage.list(folder))
        if missing:
            yield fault(
                "list",
                f"{storage.url} does not list {len(missing)} of {len(names) + 1} files that it has just taken",
                "on NFS mount it with `lookupcache=positive,actimeo=3`",
            )
        else:
            yield ok("list", f"all {len(names) + 1} files that were put are listed")
        median_s = statistics.median(seconds)
        found = f"{median_s * 1000:.0f} ms for a file on disk, {max(seconds) * 1000:.0f} ms at worst"
        if median_s > SLOW_S:
            yield warning("speed", found, "a faster storage, or a larger producer.batch_size", median_s=median_s)
        else:
            yield ok("speed", found, median_s=median_s)
        if isinstance(storage, FileStorage):
            written = storage.local(f"{folder}/clock").stat().st_mtime
            yield clocks.compared("the storage", written - (before + after) / 2, case.settings.claims)
        else:
            yield skipped("clock", "an object store refuses requests itself where the clocks are far apart")
    finally:
        storage.delete_folder(folder)


def room(case: Case) -> Iterator[Finding]:
    """What is free against the estimate of the run."""
    free = case.free_bytes
    if free is None:
        yield skipped("room", "the storage does not say how much it can hold")
        return
    least = case.settings.storage.min_free_gb * 1e9
    if free < least:
        yield fault(
            "room",
            f"{estimate.shown(free)} are free and storage.min_free_gb = {case.settings.storage.min_free_gb:g}: "
            "workers would pause at once",
            "`draftfleet runs list`, then `draftfleet runs delete` what you do not need",
            free_bytes=free,
        )
        return
    yield from _files(case)
    wanted = estimate.of(case)
    if wanted is None:
        yield skipped("room", f"{estimate.shown(free)} are free; how large the run will be is not known")
        return
    size = estimate.shown(wanted.low_bytes)
    if wanted.high_bytes > 1.1 * wanted.low_bytes:
        size += f" to {estimate.shown(wanted.high_bytes)}"
    found = f"{estimate.shown(free)} are free, the run needs {size}: {wanted.samples:,} samples, {wanted.basis}"
    values = {"free_bytes": free, "low_bytes": wanted.low_bytes, "high_bytes": wanted.high_bytes}
    if wanted.low_bytes > free - least:
        yield fault("room", found, "a larger storage.url, or fewer prompts: `--limit N`", **values)
    elif wanted.high_bytes > NEARLY * (free - least):
        yield warning("room", found, "a larger storage.url, or watch `draftfleet status`", **values)
    else:
        yield ok("room", found, **values)


def _files(case: Case) -> Iterator[Finding]:
    storage = open_storage(case.settings.storage)
    batches = estimate.num_batches(case)
    if not isinstance(storage, FileStorage) or batches is None:
        return
    space = os.statvfs(storage.root)
    if space.f_files and space.f_favail < FILES_PER_BATCH * batches:
        yield fault(
            "files",
            f"{space.f_favail:,} more files fit, the run's {batches:,} batches need {FILES_PER_BATCH * batches:,}",
            "a file system with more inodes, or a larger producer.batch_size",
        )
