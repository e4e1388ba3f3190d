"""Acceptance of checkpoints on a few held-out prompts: while a drafter trains, or of all that are there.

Prompts, limit and k are chosen once for a training and kept in acceptance-prompts.json, so that all its measurements
compare, also after a resume and while the run still grows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from draftfleet import drafters
from draftfleet.errors import CorruptFile, DrafterError, SettingsError
from draftfleet.logs import event
from draftfleet.names import split_of
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from trainer import best, checkpoint, drafter
from trainer.algorithms import Algorithm
from trainer.best import Acceptance
from trainer.checkpoint import RandomStates
from trainer.child import check_measuring
from trainer.evaluate import limits_of, load, nobody_asked, prompt_ids
from trainer.measure import count
from trainer.speculate import Answer, Limits, decode_with_drafter
from trainer.targets import Target
from trainer.targets.hf import HfTarget
from trainer.team import Team

log = logging.getLogger(__name__)

PROMPTS = "acceptance-prompts.json"

LOG_EVERY_S = 10


@dataclass(frozen=True, slots=True)
class Question:
    """What a drafter is measured on. `prompts` are token ids; answers end after `max_tokens` at the latest."""

    prompts: list[list[int]]
    max_tokens: int
    k: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


class Judge:
    """Measures a drafter while it trains. Process 0 does it, the others wait; nothing that training draws changes."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        algorithm: Algorithm,
        target: Target,
        team: Team,
        *,
        stop: Event,
        may_put: Callable[[], bool],
    ) -> None:
        """Raises SettingsError or TargetError where it could never measure: training would find out much later."""
        self._run, self._settings, self._knobs = run, settings, settings.trainer
        self._algorithm, self._team = algorithm, team
        self._stop, self._may_put = stop, may_put
        self._target: Any = target
        if self._knobs.evaluate_steps:
            check_measuring(self._knobs)
            self._target.new_cache()
            _expect_prompts(run, self._knobs.evaluate_steps)

    def is_due(self, step: int) -> bool:
        every = self._knobs.evaluate_steps
        return every > 0 and step > 0 and (step % every == 0 or step == self._knobs.max_steps)

    def measure(self, step: int, tell: Callable[[Acceptance], object]) -> bool:
        """Measure the weights as they are, write it into the checkpoint of this step, tell it, and name the best.

        Does nothing where it was measured, or while there is nothing to measure on. False if asked to stop before the
        end. Every process must call it.
        """
        return self._team.share(self._measure(step, tell) if self._team.leads else None)

    def _measure(self, step: int, tell: Callable[[Acceptance], object]) -> bool:
        question = self._question(step)
        name = self._knobs.drafter
        folder = self._run.drafter_dir(name)
        path = checkpoint.of_step(folder, step)
        before = Acceptance.find(path)
        if question is None or (before is not None and before.asked == question.digest):
            return True
        said = accepted(self._algorithm, self._target, question, self._limits(question), step=step, stop=self._stop)
        if said is None or not self._may_put():
            return False
        said.record(path)
        leading = best.announce(self._run, name) or said
        checkpoint.prune(folder, self._knobs.keep_checkpoints, best.spared(folder))
        drafters.share(self._run, name, "checkpoints")
        log.info(_event(self._run, name, said, best_step=leading.step))
        tell(said)
        return True

    def _question(self, step: int) -> Question | None:
        """The one that was chosen, or, once there are prompts enough, a new one."""
        kept = drafters.read(self._run, self._knobs.drafter, PROMPTS)
        if kept is not None:
            return Question(**kept)
        question = Question([], self._settings.evaluation.max_tokens, self._algorithm.config.num_draft_tokens)
        wanted, fault = self._knobs.evaluate_prompts, None
        try:
            question.prompts.extend(_prompts(self._run, self._settings, wanted, self._limits(question)))
        except (CorruptFile, FileNotFoundError) as error:  # its rows are not trained on: no reason to end
            fault = error
        will_grow = self._run.sealed() is None and step < self._knobs.max_steps
        if fault or not question.prompts or (will_grow and len(question.prompts) < wanted):
            said = {"held_out_prompts": len(question.prompts), "wanted": wanted} | ({"fault": fault} if fault else {})
            log.warning(event("acceptance not measured", run=self._run.name, step=step, **said))
            return None
        path = f"{self._run.name}/drafters/{self._knobs.drafter}/{PROMPTS}"
        self._run.storage.put(path, json.dumps(asdict(question)).encode())
        return question

    def _limits(self, question: Question) -> Limits:
        return limits_of(self._settings, self._target, question.max_tokens)


def measure_all(settings: Settings) -> dict[str, Any]:
    """Measure every checkpoint of `trainer.drafter` that is there, as [evaluation] says, and name the best.

    Returns the acceptance lengths by checkpoint, and which is the best. Raises DrafterError, TargetError or
    TrainingError.
    """
    run, name = Run.open(open_storage(settings.storage), settings.run), settings.trainer.drafter
    newest = best.choose(run, name, "latest")
    algorithm, target = load(newest, settings)
    target.new_cache()
    limits = limits_of(settings, target, settings.evaluation.max_tokens)
    prompts = _prompts(run, settings, settings.evaluation.prompts, limits, path=target.path)
    if not prompts:
        asked = settings.model_copy(update={"target": settings.target.model_copy(update={"path": target.path})})
        raise nobody_asked(run, len(list(prompt_ids(run, asked))))
    question = Question(prompts, settings.evaluation.max_tokens, settings.evaluation.k)
    found: dict[str, float] = {}
    for path in reversed(list(checkpoint.whole(run.drafter_dir(name)))):
        _take(algorithm, path)
        said = accepted(algorithm, target, question, limits, step=checkpoint.step_of(path))
        assert said is not None, "nobody asked it to stop"
        said.record(path)
        found[path.name] = said.acceptance_length
        log.info(_event(run, name, said))
    leading = best.announce(run, name)
    drafters.share(run, name, "checkpoints")
    assert leading is not None, "at least the newest was measured"
    return {"drafter": name, "k": question.k, "prompts": len(prompts), "acceptance_length": found, "best": leading.step}


def accepted(
    algorithm: Algorithm,
    target: HfTarget,
    question: Question,
    limits: Limits,
    *,
    step: int,
    stop: Event | None = None,
) -> Acceptance | None:
    """Draft and verify on all prompts of a question. None if asked to stop before the end.

    Modes and random states are left as they were.
    """
    began = spoken = time.monotonic()
    drafted, before = algorithm.drafter, RandomStates.now()
    was_training = drafted.training
    answers: list[Answer] = []
    drafted.eval()
    try:
        for done, prompt in enumerate(question.prompts):
            if stop is not None and stop.is_set():
                return None
            if time.monotonic() - spoken >= LOG_EVERY_S:
                spoken = time.monotonic()
                log.info(event("acceptance being measured", step=step, done=done, of=len(question.prompts)))
            answers.append(decode_with_drafter(target, algorithm.proposer(), prompt, limits, question.k))
    finally:
        drafted.train(was_training)
        before.restore()
    drafts, kept, per_position = count(answers, question.k)
    return Acceptance(
        step=step,
        acceptance_length=1 + kept / max(drafts, 1),
        acceptance_per_position=per_position,
        k=question.k,
        prompts=len(question.prompts),
        max_tokens=question.max_tokens,
        drafts=drafts,
        seconds=time.monotonic() - began,
        asked=question.digest,
    )


def _prompts(run: Run, settings: Settings, count: int, limits: Limits, *, path: str | None = None) -> list[list[int]]:
    """The first held-out prompts that leave room for an answer; `path` is the target's, where none is set."""
    asked = settings.evaluation.model_copy(update={"prompts": count})
    target = settings.target.model_copy(update={} if path is None else {"path": path})
    found = prompt_ids(run, settings.model_copy(update={"evaluation": asked, "target": target}))
    return [prompt for prompt in found if limits.of(prompt) > 1]


def _take(algorithm: Algorithm, path: Path) -> None:
    try:
        algorithm.drafter.load_state_dict(drafter.load(path)[1])
    except RuntimeError as error:
        raise DrafterError(f"{path} is of another drafter than the newest checkpoint beside it: {error}") from None


def _expect_prompts(run: Run, steps: int) -> None:
    """A run that is still being produced may yet get some."""
    if run.sealed() is not None and all(split_of(batch) != "heldout" for batch in run.batches()):
        raise SettingsError(
            f"trainer.evaluate_steps = {steps}: run {run.name} has no held-out prompts to measure on. Set it to 0, or "
            "produce a run with producer.heldout above 0 or with a split column."
        )


def _event(run: Run, name: str, said: Acceptance, **more: object) -> str:
    return event(
        "acceptance measured",
        run=run.name,
        drafter=name,
        step=said.step,
        acceptance_length=said.acceptance_length,
        k=said.k,
        prompts=said.prompts,
        seconds=said.seconds,
        **more,
    )
