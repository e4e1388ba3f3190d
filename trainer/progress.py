"""progress.json: how a training is getting on, for `draftfleet status`, Flower and the demo. Written by process 0."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from draftfleet.errors import StorageError
from draftfleet.logs import event
from draftfleet.runs import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`tokens` went through the drafter, prompts included, padding not; `trained_tokens` had a loss.

    Loss, accuracy (of each draft position), tokens_per_s and the share of their time that stood still for hidden states
    are of the latest `log_steps` steps, waits for samples left out.
    `vocabulary_coverage` is that of a drafter's own vocabulary (trainer.vocabulary), `acceptance_length` what was
    measured last, at `acceptance_step` (trainer.acceptance); `error` says why the training ended early.
    """

    step: int
    max_steps: int
    checkpoint_step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float | None = None
    accuracy: list[float] = field(default_factory=list[float])
    tokens_per_s: float = 0.0
    waited_for_states: float = 0.0
    rows_admitted: int = 0
    rows_not_trained: dict[str, int] = field(default_factory=dict[str, int])
    corrupt_shards: int = 0
    waiting: bool = False
    finished: bool = False
    vocabulary_coverage: float | None = None
    acceptance_length: float | None = None
    acceptance_step: int = 0
    error: str | None = None

    def __str__(self) -> str:
        parts = [f"step {self.step:,}/{self.max_steps:,}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3g}")
        if self.acceptance_length is not None:
            parts.append(f"acceptance {self.acceptance_length:.2f} at step {self.acceptance_step:,}")
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s / 1000:.1f}k tok/s")
        if self.waiting:
            parts.append(f"waiting for samples, {self.rows_admitted:,} rows so far")
        return ", ".join(parts)

    @classmethod
    def finish(cls, run: Run, drafter: str, step: int) -> None:
        """Say that the checkpoint of the last step is in place, where its writer was killed before it could."""
        held = cls.read(run, drafter) or cls(step=step, max_steps=step)
        if not held.finished:
            replace(held, step=step, checkpoint_step=step, waiting=False, finished=True).write(run, drafter)

    @classmethod
    def fail(cls, run: Run, drafter: str, max_steps: int, error: str) -> None:
        """Say why the training ended early. The next one begins without it."""
        held = cls.read(run, drafter) or cls(step=0, max_steps=max_steps)
        replace(held, waiting=False, error=error).write(run, drafter)

    def write(self, run: Run, drafter: str) -> None:
        """Put it. A storage that refuses costs the reader this look, not the training."""
        try:
            run.storage.put(_path(run, drafter), (json.dumps(asdict(self), indent=1) + "\n").encode())
        except StorageError as error:
            log.warning(event("progress not written", run=run.name, drafter=drafter, error=error))

    @classmethod
    def read(cls, run: Run, drafter: str) -> Self | None:
        """None if there is none, or one of another version."""
        try:
            return cls(**json.loads(run.storage.read(_path(run, drafter))))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def _path(run: Run, drafter: str) -> str:
    return f"{run.name}/drafters/{drafter}/progress.json"
