"""How good a drafter is: greedy draft-and-verify on held-out prompts, beside plain greedy decoding.

acceptance length   1 + accepted / drafts over all prompts together: the tokens that a pass of the target keeps,
                    its own (the bonus token) included. At most k + 1. Counted as vLLM counts.
per position        accepted at this position of a draft / drafts
lossless            the tokens equal those of plain greedy decoding; exact in float32 only
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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

from draftfleet import drawing, tokens
from draftfleet.errors import DrafterError, TargetError, TrainingError
from draftfleet.logs import event
from draftfleet.names import is_again, split_of
from draftfleet.outcomes import best
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from trainer import algorithms, drafter
from trainer.algorithms import Algorithm
from trainer.best import choose
from trainer.devices import choose_device
from trainer.measure import Track, count, measure
from trainer.speculate import Limits
from trainer.targets import hf
from trainer.targets.hf import HfTarget

log = logging.getLogger(__name__)

FILE = "evaluation.json"


LOG_EVERY_S = 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`drafts` are passes of the target that verified a draft. `prompts_too_long` leave no room for an answer.

    `rechecked` prompts came out differently when they were decoded plainly in a batch, whose sums run in another order,
    and were compared again with plain decoding alone. Speeds are of one request at a time, over `timed_prompts`.
    """

    run: str
    drafter: str
    checkpoint: str
    k: int
    prompts: int
    prompts_too_long: int
    tokens: int
    drafts: int
    drafted: int
    accepted: int
    acceptance_length: float
    acceptance_per_position: list[float]
    lossless: bool
    lossless_prompts: int
    rechecked: int
    timed_prompts: int
    tokens_per_s: float
    plain_tokens_per_s: float
    speedup: float
    seconds: float
    dtype: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def evaluate(settings: Settings, *, progress: bool, which: str = "") -> Evaluation:
    """Judge a checkpoint of `trainer.drafter`, see `trainer.best.choose`; write evaluation.json.

    Raises DrafterError without a drafter, TargetError if it does not fit the target, TrainingError without prompts.
    """
    started = time.monotonic()
    run = Run.open(open_storage(settings.storage), settings.run)
    found = choose(run, settings.trainer.drafter, which)
    algorithm, target = load(found, settings)
    context_tokens = settings.target.context_tokens or int(target.config.max_position_embeddings)
    limits = Limits(settings.evaluation.max_tokens, context_tokens)
    asked = list(prompt_ids(run, _with_target(settings, target.path)))
    prompts = [prompt for prompt in asked if limits.of(prompt) > 1]
    if not prompts:
        raise TrainingError(
            f"run {run.name} has {len(asked)} held-out prompts, of which none leaves room for an answer: produce some "
            "with producer.heldout above 0 or with a split column, or raise target.context_tokens."
        )
    log.info(event("evaluation started", run=run.name, drafter=found, prompts=len(prompts)))

    with _tracking(progress) as track:
        measured = measure(algorithm, target, prompts, limits=limits, k=settings.evaluation.k, track=track)
    drafts, accepted, per_position = count(measured.answers, settings.evaluation.k)
    equal = sum(answer.ids == ids for answer, ids in zip(measured.answers, measured.plain, strict=True))
    evaluation = Evaluation(
        run=run.name,
        drafter=settings.trainer.drafter,
        checkpoint=found.name,
        k=settings.evaluation.k,
        prompts=len(prompts),
        prompts_too_long=len(asked) - len(prompts),
        tokens=sum(len(answer.ids) for answer in measured.answers),
        drafts=drafts,
        drafted=sum(sum(answer.drafted) for answer in measured.answers),
        accepted=accepted,
        acceptance_length=1 + accepted / max(drafts, 1),
        acceptance_per_position=per_position,
        lossless=equal == len(prompts),
        lossless_prompts=equal,
        rechecked=measured.rechecked,
        timed_prompts=measured.timed,
        tokens_per_s=measured.tokens_per_s,
        plain_tokens_per_s=measured.plain_tokens_per_s,
        speedup=measured.tokens_per_s / measured.plain_tokens_per_s,
        seconds=time.monotonic() - started,
        dtype=settings.evaluation.dtype,
    )
    run.storage.put(f"{run.name}/drafters/{settings.trainer.drafter}/{FILE}", evaluation.to_json().encode())
    log.info(
        event(
            "evaluation done",
            run=run.name,
            acceptance_length=evaluation.acceptance_length,
            lossless=f"{equal}/{len(prompts)}",
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


def prompt_ids(run: Run, settings: Settings) -> Iterator[list[int]]:
    """The first `evaluation.prompts` held-out prompts: the ids that were served, where their batch is done; else the
    target's tokenizer and the switches that the run pins."""
    left = settings.evaluation.prompts
    batches = [batch for batch in run.batches() if split_of(batch) == "heldout"]
    again = [
        sample for batch in batches if is_again(batch) and run.is_done(batch) for sample in run.read_samples(batch)
    ]
    for batch in batches:
        if is_again(batch) or left == 0:  # its prompts are those of other batches
            continue
        samples = run.read_samples(batch) if run.is_done(batch) else []
        served = {key: sample.prompt_token_ids for key, sample in best([*samples, *again]).items()}
        for prompt in [prompt for prompt in run.read_prompts(batch) if prompt.sample == 0][:left]:
            yield served.get(prompt.row_key) or _render(run, settings, prompt)
            left -= 1


def _with_target(settings: Settings, path: str) -> Settings:
    return settings.model_copy(update={"target": settings.target.model_copy(update={"path": path})})


def _render(run: Run, settings: Settings, prompt: Prompt) -> list[int]:
    asked = drawing.asked(run) if "sampling.thinking" in run.info.content else settings.sampling
    sampling, _ = drawing.drawn(asked, prompt.row_key)
    return tokens.load(settings.target.path).prompt_ids(
        prompt.messages, prompt.tools, sampling.thinking, sampling.template_kwargs
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
