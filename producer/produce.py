"""From a data set to the queue: `draftfleet produce`. docs/producing.md says what it reads and counts.

source -> reading (prompts, or a counted fault) -> ledger (new, or known) -> batches of a split
       -> prompt shard -> reference in the queue                  at the end: sealed.json
"""

from __future__ import annotations

import logging
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import redis
from tenacity import RetryCallState, retry, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from draftfleet import drawing, fleet, orders, tokens
from draftfleet import settings as sections
from draftfleet.errors import QueueError, RunMissing, SettingsError, TargetError
from draftfleet.logs import event
from draftfleet.queue import connect, make_app, publish
from draftfleet.reconcile import Reconciler
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import Storage, open_storage, probe
from producer.batches import Batch, Batches, Publish, Writer, first_asked, next_numbers
from producer.chosen import chosen
from producer.ids import Held, IdFiles, read_held
from producer.lease import Lease
from producer.ledger import Ledger, Overlap
from producer.lengths import token_counter
from producer.progress import watched
from producer.reading import Reading
from producer.report import Report, report_of, totals
from producer.sources import Source, open_source
from producer.unchanged import earlier_report, fingerprint, passes_of, with_pass

log = logging.getLogger(__name__)

PINNED = ("batch_size", "heldout", "split_column", "turns")
"""Knobs of `producer` that decide what is asked, or what a batch holds."""


def produce(settings: Settings, *, progress: bool) -> Report:
    """Add what is new in `producer.data`, or in all `producer.sources`, to the run, and seal it.

    The first batches are in the queue before the data set has been read to its end. After a crash, run it again: no
    prompt is lost or doubled. Raises SettingsError, DataError, RunConflict, RunBusy, StorageError or QueueError.
    """
    _check(settings)
    _warn_of_equal_samples(settings.sampling)
    count_tokens = token_counter(settings)
    source = open_source(settings.producer)
    reading = Reading(source, settings.producer, count_tokens)
    shared = open_storage(settings.storage)
    probe(shared)
    client, app = connect(settings), make_app(settings)
    with watched(source, reading, enabled=progress), _queue_faults():
        run, prompts = _open_run(shared, settings, source, iter(reading))
        with Lease(client, run, settings.claims) as lease:
            fleet.describe(run, settings)
            orders.begin(settings, run, client)
            Reconciler(app, client, shared, settings.claims, [settings.model]).republish()
            publish_batches = _patient(partial(publish, app, client, run, settings.model), settings.claims.ttl_s)
            return fill(
                run,
                prompts,
                reading,
                settings.producer,
                publish=publish_batches,
                may_write=lease.check,
            )


def fill(
    run: Run,
    prompts: Iterator[Prompt],
    reading: Reading,
    knobs: sections.Producer,
    *,
    publish: Publish,
    may_write: Callable[[], None],
) -> Report:
    """Write and publish the prompts that the run lacks, then seal it. `reading` counts what yields `prompts`."""
    started = time.monotonic()
    present = first_asked(run.batches())
    known = fingerprint(reading.source, knobs)
    if (report := earlier_report(run, reading.source, known, present)) is not None:
        log.info(event("data set unchanged, not read again", run=run.name, source=report.source))
        return report
    passes, sampling = passes_of(run), drawing.asked(run)
    ledger, overlap, id_files = Ledger(), Overlap(), IdFiles(run)
    for held, is_filed in read_held(run, present):
        ledger.hold(held)
        overlap.add(held)
        if not is_filed:
            id_files.add(held)

    def note(batch: Batch) -> None:
        held = Held.of(*batch)
        overlap.add(held)
        id_files.add(held)

    with Writer(run, publish, may_write, note) as writer:
        batches = Batches(knobs.batch_size, next_numbers(present), writer.put, samples=sampling.n)
        for prompt in prompts:
            if ledger.meet(prompt):
                batches.add(prompt)
        batches.close()
    id_files.flush()
    report = report_of(
        run,
        reading,
        ledger,
        sampling=sampling,
        num_before=len(present),
        num_written=writer.num_written,
        overlap=overlap.count(),
        seconds=time.monotonic() - started,
    )
    may_write()
    run.seal(totals(report, reading.source, with_pass(passes, known, report, reading.source)))
    return report


def _check(settings: Settings) -> None:
    chosen(settings.producer)
    if not settings.model:
        raise SettingsError("target.model is not set: give the name under which the servers serve the target.")
    path = settings.target.path
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
        raise SettingsError(
            f"target.path = {path} is not there: name the folder that holds the target's tokenizer.json, or its name "
            "on the hub. On a node without it leave it unset, and name the target with target.model."
        )


def _warn_of_equal_samples(sampling: sections.Sampling) -> None:
    temperatures = {way.drawn.get("temperature", sampling.temperature) for way in drawing.ways(sampling)}
    if sampling.n > 1 and temperatures == {0}:
        do = "set sampling.temperature above 0, or sampling.n = 1"
        log.warning(event("samples of a prompt will be equal", n=sampling.n, temperature=0, do=do))


def _open_run(
    shared: Storage, settings: Settings, source: Source, prompts: Iterator[Prompt]
) -> tuple[Run, Iterator[Prompt]]:
    """An existing run is checked first. A new one is made when there is a first prompt: a wrong file leaves none."""
    content = content_of(settings)
    try:
        existing = Run.open(shared, settings.run)
    except RunMissing:
        prompts = chain([next(prompts)], prompts)
        return Run.create(shared, settings.run, content, provenance_of(source)), prompts
    pinned = existing.info.content.get("target.fingerprint")
    if pinned is None or content["target.fingerprint"] is None:  # unknown on one side: there is nothing to compare
        if content["target.fingerprint"] is not None:
            log.warning(
                event(
                    "target fingerprint not compared",
                    run=settings.run,
                    path=settings.target.path,
                    why="the run was made without the tokenizer and pins none",
                )
            )
        content["target.fingerprint"] = pinned
    return Run.create(shared, settings.run, content, {}, UNPINNED), prompts


def content_of(settings: Settings) -> dict[str, Any]:
    """What the run pins. Servers, concurrency, paths and the data set may change: a run can move, and grow."""
    return {
        "target.model": settings.model,
        "target.fingerprint": _fingerprint(settings.target.path),
        **_pins(settings.sampling, settings.producer),
    }


def _pins(sampling: sections.Sampling, knobs: sections.Producer) -> dict[str, Any]:
    asked = {f"sampling.{key}": value for key, value in sampling.model_dump(mode="json").items()}
    return asked | {f"producer.{key}": getattr(knobs, key) for key in PINNED}


UNPINNED = _pins(sections.Sampling(), sections.Producer())
"""What holds in a run that an older version made, which knew no such knob."""


def provenance_of(source: Source) -> dict[str, Any]:
    return {
        "data.source": source.provenance,
        "command": without_secrets(sys.argv),
        "python": platform.python_version(),
        "host": socket.gethostname(),
    }


def without_secrets(command: Sequence[str]) -> str:
    """The command line with passwords in addresses, and values of keys that sound secret, left out."""
    text = shlex.join(command)
    text = re.sub(r"(?<=://)[^/\s]*@", "***@", text)
    return re.sub(r"(?i)((?:password|api[-_]key|token|secret)[=\s]+)('[^']*'|\S+)", r"\1***", text)


def _fingerprint(path: str) -> str | None:
    """Of the target's tokenizer and template; None where this node has none."""
    if not path:
        return None
    try:
        return tokens.load(Path(path).expanduser()).fingerprint()
    except TargetError as error:
        log.warning(event("target fingerprint unknown", path=path, why=error))
        return None


def _patient(publish_batches: Publish, patience_s: float) -> Publish:
    """Publish again while Redis is away, as long as a lease lasts. Twice is harmless: a message is a hint."""

    def note(attempt: RetryCallState) -> None:
        log.warning(event("publishing failed, trying again", attempt=attempt.attempt_number))

    return retry(
        retry=retry_if_exception_type(QueueError),
        stop=stop_after_delay(patience_s),
        wait=wait_exponential_jitter(initial=0.1, max=5),
        before_sleep=note,
        reraise=True,
    )(publish_batches)


@contextmanager
def _queue_faults() -> Generator[None]:
    try:
        yield
    except (redis.RedisError, QueueError) as error:
        raise QueueError(
            f"Redis failed while the run was being filled: {error}. What is in the storage stays: once Redis answers, "
            "produce again and it goes on; nothing is lost or doubled."
        ) from error
