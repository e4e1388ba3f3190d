"""What a drafter gains in a serving engine: `draftfleet bench`. It starts no server, and needs no torch."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from draftfleet import drafters, drawing, tokens
from draftfleet.addresses import expand
from draftfleet.benching import Options
from draftfleet.errors import ServerError, SettingsError
from draftfleet.logs import event
from draftfleet.redaction import redact
from draftfleet.runs import Run
from draftfleet.settings import Settings
from workers.bench import figures, report, sides
from workers.bench.figures import Bench, Figures, Level, Spread
from workers.bench.measuring import WAVES, Measurement, Plan
from workers.bench.questions import FirstPrompts, questions, run_of
from workers.bench.sides import Name, Side
from workers.client import Client

__all__ = ["FILE", "Bench", "Figures", "Level", "Spread", "bench", "found"]

log = logging.getLogger(__name__)

FILE = "bench.json"
"""In the folder of the drafter."""

FOLDERS = {"vllm": ("vllm", "speculators"), "sglang": ("sglang",)}
"""Formats of exports that an engine serves."""


def bench(
    settings: Settings, options: Options, *, first_prompts: FirstPrompts, as_json: bool = False, progress: bool = False
) -> int:
    """Measure, print what was found, also if a server ended meanwhile, and return the exit code."""
    result, error = _measured(settings, options, first_prompts=first_prompts, progress=progress)
    if as_json:
        print(result.to_json(), end="", flush=True)
    else:
        report.show(result)
    if error is not None:
        raise error
    return 0


def found(settings: Settings, options: Options, *, first_prompts: FirstPrompts, progress: bool = False) -> Bench:
    """Measure and print nothing. Raises ServerError where a server ended; what was measured is in the file."""
    result, error = _measured(settings, options, first_prompts=first_prompts, progress=progress)
    if error is not None:
        raise error
    return result


def _measured(
    settings: Settings, options: Options, *, first_prompts: FirstPrompts, progress: bool
) -> tuple[Bench, ServerError | KeyboardInterrupt | None]:
    """Raises where nothing could be measured. The error that ended it early comes back with the figures until then."""
    urls = _checked(options)
    run = run_of(settings)
    max_tokens = options.max_tokens or settings.evaluation.max_tokens
    asked = questions(
        settings,
        run,
        options.file,
        first_prompts,
        count=max(options.limit, WAVES * max(options.concurrency)),
        max_tokens=max_tokens,
        temperature=options.temperature,
    )
    plan = Plan(asked, options.limit, list(dict.fromkeys(options.concurrency)), options.repeat)
    began = time.monotonic()
    result = Bench(
        model="",
        dialect="",
        with_url=redact(urls["with"]),
        without_url=redact(urls["without"]) if "without" in urls else None,
        prompts_from=options.file or f"held-out prompts of run {settings.run}",
        max_tokens=max_tokens,
        temperature=options.temperature,
        repeat=options.repeat,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        drafter=_drafter(settings, run),
    )
    error: ServerError | KeyboardInterrupt | None = None
    measurement = Measurement([], plan)
    with report.progress(plan.requests(len(urls)), enabled=progress) as advance:
        measurement.advance = advance
        try:
            asyncio.run(_run(settings, run, urls, measurement, result))
        except (ServerError, KeyboardInterrupt) as stop:
            if not measurement.windows:
                raise
            error = stop
            result.error = redact(stop.summary) if isinstance(stop, ServerError) else "it was interrupted"
    _fill(result, measurement, time.monotonic() - began)
    _keep(run, result)
    return result, error


async def _run(
    settings: Settings, run: Run | None, urls: dict[Name, str], measurement: Measurement, result: Bench
) -> None:
    client = Client(settings.worker)
    try:
        pair = await _looked_at(settings, run, client, urls)
        result.model, result.dialect = pair[0].model, pair[0].dialect.NAME
        result.checkpoint = _exported(run, result)
        measurement.sides = pair
        log.info(event("bench started", model=result.model, dialect=result.dialect, servers=len(pair)))
        await measurement.run()
        if len(pair) == 2 and result.temperature == 0:
            await measurement.look_into_differences()
    finally:
        await client.close()


async def _looked_at(settings: Settings, run: Run | None, client: Client, urls: dict[Name, str]) -> list[Side]:
    model = settings.target.model or ("" if run is None else drawing.model(run))
    tokenizer = tokens.load(settings.target.path) if settings.target.path else None
    found = [
        await sides.look(client, name, url, model=model, dialect=settings.worker.dialect, tokenizer=tokenizer)
        for name, url in urls.items()
    ]
    sides.check_alike(found)
    return found


def _checked(options: Options) -> dict[Name, str]:
    """The addresses. Raises SettingsError, also for other options that make no sense."""
    for name, value in (
        ("concurrency", options.concurrency), ("repeat", [options.repeat]), ("limit", [options.limit]),
        ("max-tokens", [1 if options.max_tokens is None else options.max_tokens]),
    ):  # fmt: skip
        if not value or min(value) < 1:
            raise SettingsError(f"--{name} {', '.join(map(str, value)) or '(nothing)'}: numbers from 1.")
    if options.temperature < 0:
        raise SettingsError(f"--temperature {options.temperature:g}: 0 for greedy answers, or more.")
    written: dict[Name, str] = {"with": options.with_url}
    if options.without_url is not None:
        written["without"] = options.without_url
    urls: dict[Name, str] = {}
    for name, text in written.items():
        try:
            addresses = expand([text])
        except SettingsError as error:
            raise SettingsError(f"--{name} {text}: {error}") from None
        if len(addresses) > 1:
            raise SettingsError(f"--{name} {text}: one server, not {len(addresses)}.")
        urls[name] = addresses[0].url
    if urls.get("without") == urls["with"]:
        raise SettingsError(
            f"--with and --without are both {urls['with']}: start the target twice, once with the drafter and once "
            "without it, or leave --without away."
        )
    return urls


def _fill(result: Bench, measurement: Measurement, seconds: float) -> None:
    windows = measurement.windows
    result.seconds = seconds
    result.levels = figures.levels(windows, compares=result.temperature == 0)
    parts = [one.acceptance for one in windows if one.side == "with" and one.acceptance is not None]
    result.acceptance = figures.pooled(parts)
    result.differences = measurement.differences
    result.warnings = list(_warnings(result, measurement))


def _warnings(result: Bench, measurement: Measurement) -> list[str]:
    said: list[str] = []
    url_of = {side.name: redact(side.url) for side in measurement.sides}
    for one in measurement.windows:
        where = f"--{one.side} {url_of[one.side]}, {one.concurrency} at once, repeat {one.repeat + 1}"
        if one.others:
            what = (
                f"{one.others:,} requests of other clients" if one.others > 0 else f"{-one.others:,} requests uncounted"
            )
            said.append(f"{where}: {what} while it was measured: its figures and counters are not ours alone")
    if uncounted := sorted({one.side for one in measurement.windows if one.others is None}):
        said.append(
            f"{' and '.join(f'--{side} {url_of[side]}' for side in uncounted)} counts no requests: whether others "
            "asked meanwhile cannot be seen"
        )
    most, available = max(measurement.plan.concurrency), len(measurement.plan.questions)
    if available < most:
        said.append(f"there are {available} prompts, and {most} are asked at once: some were asked more than once")
    accepted = result.acceptance
    if accepted is not None and accepted.source == "gauge":
        said.append(
            "SGLang's gauge tells a mean of its last steps alone: with --target it is asked through /generate, which "
            "counts the drafts of each answer"
        )
    if accepted is not None and accepted.drafts and not accepted.accepted:
        said.append("not one drafted token was kept: the drafter is of another target, or not loaded as it was trained")
    apart = [one for one in result.differences if one.gap is not None and not one.is_near_tie]
    if apart:
        said.append(
            f"{len(apart)} answers part where the target had no near tie: a drafter changes no greedy answer, so look "
            "at the options of the two servers"
        )
    return said


def _drafter(settings: Settings, run: Run | None) -> str | None:
    """None where the run does not have it."""
    name = settings.trainer.drafter
    return name if run is not None and name in drafters.names(run) else None


def _exported(run: Run | None, result: Bench) -> str | None:
    """The checkpoint of the latest export for this engine: what a server serves it does not say. None if none is there.

    Raises CorruptFile.
    """
    if run is None or result.drafter is None:
        return None
    folders = FOLDERS[result.dialect.removesuffix("-native")]
    found = [drafters.read(run, result.drafter, f"export/{folder}/export.json") for folder in folders]
    steps = [int(one["step"]) for one in found if one is not None]
    return f"step-{max(steps):06d}" if steps else None


def _keep(run: Run | None, result: Bench) -> None:
    """Beside the drafter, where the run has it."""
    if run is None:
        return
    if result.drafter is None:
        log.warning(event("bench not written", run=run.name, because="the run has no drafter of that name: --drafter"))
        return
    run.storage.put(f"{run.name}/drafters/{result.drafter}/{FILE}", result.to_json().encode())
    log.info(event("bench written", run=run.name, drafter=result.drafter, file=FILE))
