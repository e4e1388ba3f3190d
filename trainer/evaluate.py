"""How good a drafter is: draft-and-verify on held-out prompts, beside plain decoding.

acceptance length   1 + accepted / drafts over all prompts together: the tokens that a pass of the target keeps,
                    its own (the bonus token) included. At most k + 1. Counted as vLLM counts.
per position        accepted at this position of a draft / drafts
lossless            the tokens equal those of plain greedy decoding; exact in float32 only
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from draftfleet import drafters, tokens
from draftfleet.errors import DrafterError, TargetError, TrainingError
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from trainer import algorithms, drafter
from trainer.algorithms import Algorithm
from trainer.best import choose
from trainer.devices import choose_device
from trainer.evaluation.asking import Asked, asked
from trainer.evaluation.counts import (
    DraftCount,
    acceptance,
    bucket,
    bucket_order,
    drafts_of,
    num_thinking,
    parts,
)
from trainer.evaluation.forced import alarm, compare, overfit
from trainer.evaluation.report import Evaluation, SweepRow
from trainer.evaluation.rules import Sampling
from trainer.measure import Measured, Track, sweep
from trainer.speculate import Answer, Limits
from trainer.targets import hf
from trainer.targets.hf import HfTarget

log = logging.getLogger(__name__)

FILE = "evaluation.json"


LOG_EVERY_S = 10

T = TypeVar("T")


def evaluate(settings: Settings, *, progress: bool, which: str = "") -> Evaluation:
    """Judge a checkpoint of `trainer.drafter`, see `trainer.best.choose`; write evaluation.json.

    Raises DrafterError without a drafter, TargetError if it does not fit the target, TrainingError without prompts.
    """
    started = time.monotonic()
    knobs = settings.evaluation
    run = Run.open(open_storage(settings.storage), settings.run)
    found = choose(run, settings.trainer.drafter, which)
    algorithm, target = load(found, settings)
    limits = limits_of(settings, target, knobs.max_tokens)
    everybody = list(asked(run, _with_target(settings, target.path)))
    judged = [one for one in everybody if limits.of(one.ids) > 1]
    if not judged:
        raise nobody_asked(run, len(everybody))
    ks = _draftable({*knobs.sweep, knobs.k}, algorithm)
    k = ks[-1]
    log.info(event("evaluation started", run=run.name, drafter=found, prompts=len(judged), k="/".join(map(str, ks))))

    sampling = Sampling(knobs.temperature, knobs.drafts == "best", knobs.seed)
    with _tracking(progress) as track:
        prompts = [one.ids for one in judged]
        swept = sweep(algorithm, target, prompts, limits=limits, ks=ks, track=track, sampling=sampling)
        answers = swept[k].answers
        is_greedy = sampling.temperature == 0
        forced = compare(algorithm, target, judged, answers, k=k, track=track) if is_greedy else None
    thinking = _thinking(target.path, judged, answers)
    drafts = [
        draft
        for one, answer, many in zip(judged, answers, thinking, strict=True)
        for draft in drafts_of(one, answer, many)
    ]
    whole, expected = acceptance(drafts, k), None if is_greedy else _expected(drafts, k)
    rows = [_row(k, measured, judged, is_greedy=is_greedy) for k, measured in swept.items()]
    trained = drafters.read(run, settings.trainer.drafter, "progress.json") or {}
    said = [] if forced is None else [alarm(forced), overfit(forced, trained.get("accuracy"))]
    by_turn = parts(drafts, lambda draft: str(draft.turn + 1), k)
    evaluation = Evaluation(
        run=run.name,
        drafter=settings.trainer.drafter,
        checkpoint=found.name,
        k=k,
        temperature=knobs.temperature,
        drafts_are="best" if is_greedy else knobs.drafts,
        seed=knobs.seed,
        prompts=len(judged),
        conversations=len({one.conversation for one in judged}),
        prompts_too_long=len(everybody) - len(judged),
        tokens=sum(len(answer.ids) for answer in answers),
        drafts=whole.drafts,
        drafted=sum(sum(answer.drafted) for answer in answers),
        accepted=whole.accepted,
        acceptance_length=whole.acceptance_length,
        interval=whole.interval,
        acceptance_per_position=whole.acceptance_per_position,
        expected_acceptance_length=None if expected is None else 1 + sum(expected),
        expected_acceptance_per_position=expected,
        lossless=rows[-1].lossless_prompts == len(judged) if is_greedy else None,
        lossless_prompts=rows[-1].lossless_prompts,
        rechecked=swept[k].rechecked,
        timed_prompts=swept[k].timed,
        tokens_per_s=swept[k].tokens_per_s,
        plain_tokens_per_s=swept[k].plain_tokens_per_s,
        speedup=rows[-1].speedup,
        seconds=time.monotonic() - started,
        dtype=knobs.dtype,
        sweep=rows,
        domains=parts(drafts, lambda draft: draft.source, k),
        phases=parts(drafts, lambda draft: draft.phase, k),
        context=dict(
            sorted(parts(drafts, lambda draft: bucket(draft.position), k).items(), key=lambda one: bucket_order(one[0]))
        ),
        turns=dict(sorted(by_turn.items(), key=lambda one: int(one[0]))) if len(by_turn) > 1 else {},
        teacher_forced=forced,
        warnings=[warning for warning in said if warning is not None],
    )
    run.storage.put(f"{run.name}/drafters/{settings.trainer.drafter}/{FILE}", evaluation.to_json().encode())
    for warning in evaluation.warnings:
        log.warning(event("evaluation warned", run=run.name, warning=warning))
    log.info(
        event(
            "evaluation done",
            run=run.name,
            acceptance_length=evaluation.acceptance_length,
            lossless="-" if evaluation.lossless is None else f"{evaluation.lossless_prompts}/{len(judged)}",
            speedup=evaluation.speedup,
            seconds=evaluation.seconds,
        )
    )
    return evaluation


def load(folder: Path, settings: Settings) -> tuple[Algorithm, HfTarget]:
    """A drafter, in float32, and its target: where none is set, the one it was trained for.

    Raises DrafterError or TargetError.
    """
    config, tensors = drafter.load(folder)
    knobs = settings.trainer.model_copy(update={"dtype": settings.evaluation.dtype})
    path = settings.target.path or config.target
    target = hf.load(
        _with_target(settings, path).model_copy(update={"trainer": knobs}), config.layers, choose_device(knobs.device)
    )
    had = (config.num_target_layers, config.target_hidden_size, config.vocab_size)
    has = (target.config.num_hidden_layers, target.config.hidden_size, len(target.embedding))
    if had != has:
        raise TargetError(
            f"{folder} drafts for a target with {had[0]} layers of width {had[1]} and a vocabulary of {had[2]} "
            f"({config.target}); target.path = {path} has {has[0]}, {has[1]} and {has[2]}: name the target that it "
            "was trained for."
        )
    algorithm = algorithms.build(config, target)
    try:
        algorithm.drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise DrafterError(f"{folder} does not fit its own drafter.json: {error}") from None
    algorithm.drafter.eval()
    return algorithm, target


def nobody_asked(run: Run, num_prompts: int) -> TrainingError:
    """Of a run with so many held-out prompts, all too long."""
    if num_prompts == 0:
        return TrainingError(
            f"run {run.name} has no held-out prompts: produce one with producer.heldout above 0 or with a split column."
        )
    return TrainingError(
        f"run {run.name} has {num_prompts} held-out prompts, of which none leaves room for an answer: raise "
        "target.context_tokens."
    )


def limits_of(settings: Settings, target: HfTarget, max_tokens: int) -> Limits:
    """Answers of at most `max_tokens`, within the context that the target is served with."""
    return Limits(max_tokens, settings.target.context_tokens or int(target.config.max_position_embeddings))


def prompt_ids(run: Run, settings: Settings) -> Iterator[list[int]]:
    """The ids of those that are asked, in the order of `trainer.evaluation.asking`."""
    return (one.ids for one in asked(run, settings))


def _with_target(settings: Settings, path: str) -> Settings:
    return settings.model_copy(update={"target": settings.target.model_copy(update={"path": path})})


def _draftable(ks: set[int], algorithm: Algorithm) -> list[int]:
    """Ascending. A block of a DFlash drafter has no more than it was trained with."""
    most = algorithm.config.block_size - 1 if algorithm.config.block_size else max(ks)
    if max(ks) > most:
        log.warning(event("drafts shortened", k=max(ks), to=most, block_size=algorithm.config.block_size))
    return sorted({min(k, most) for k in ks})


def _thinking(path: str, judged: list[Asked], answers: list[Answer]) -> list[int]:
    """Of each answer how many tokens are its thought. Without a tokenizer nobody can tell: none."""
    try:
        tokenizer = tokens.load(path)
    except TargetError as error:
        log.warning(event("thoughts not told apart", error=error))
        return [0] * len(answers)
    return [num_thinking(tokenizer, one.ids, answer.ids) for one, answer in zip(judged, answers, strict=True)]


def _expected(drafts: list[DraftCount], k: int) -> list[float]:
    """Of each position the chance of being kept, by sum min(p, q)."""
    return [
        sum(draft.chances[at] for draft in drafts if at < len(draft.chances)) / max(len(drafts), 1) for at in range(k)
    ]


def _row(k: int, measured: Measured, judged: list[Asked], *, is_greedy: bool) -> SweepRow:
    answers = measured.answers
    drafts = [draft for one, answer in zip(judged, answers, strict=True) for draft in drafts_of(one, answer, 0)]
    found = acceptance(drafts, k)
    equal = sum(answer.ids == ids for answer, ids in zip(answers, measured.plain, strict=False))
    return SweepRow(
        k=k,
        drafts=found.drafts,
        accepted=found.accepted,
        acceptance_length=found.acceptance_length,
        interval=found.interval,
        acceptance_per_position=found.acceptance_per_position,
        lossless_prompts=equal if is_greedy else None,
        tokens_per_s=measured.tokens_per_s,
        speedup=measured.tokens_per_s / measured.plain_tokens_per_s,
    )


@contextmanager
def _tracking(progress: bool) -> Generator[Track]:
    """Bars with rate and time left on a terminal, a log line now and then elsewhere."""
    if not (progress and sys.stderr.isatty()):
        yield _logged
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:>20}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def track(items: Sequence[T], title: str) -> Iterable[T]:
            return bars.track(items, description=title) if items else items

        yield track


class _Rate(ProgressColumn):
    """A task has no speed until its second item."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.2f}/s")


def _logged(items: Sequence[T], title: str) -> Iterable[T]:
    started = spoken = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - spoken >= LOG_EVERY_S:
            spoken = now
            left_s = (now - started) / done * (len(items) - done)
            log.info(event("evaluation went on", what=title, done=done, of=len(items), left_s=round(left_s)))
