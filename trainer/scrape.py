"""What a trainer shows Prometheus: how the training that it was given last is getting on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import draftfleet
from draftfleet.metrics import gauge
from draftfleet.runs import Run
from trainer.progress import Progress

LABELS = ("run", "drafter")
EVALUATION = "evaluation.json"

FIELDS = {
    "step": "Optimizer steps done.",
    "max_steps": "Optimizer steps to be done.",
    "checkpoint_step": "Step of the newest checkpoint.",
    "tokens": "Tokens that went through the drafter, prompts included.",
    "trained_tokens": "Of these the tokens that had a loss.",
    "loss": "Mean loss of the latest log_steps steps.",
    "tokens_per_s": "Tokens per second of the latest log_steps steps, waits for samples left out.",
    "waited_for_states": "Share of their time that stood still for hidden states: near 1 the target is the bottleneck.",
    "rows_admitted": "Rows that are good to train on, so far.",
    "corrupt_shards": "Shards that could not be read.",
    "waiting": "1 while it waits for samples.",
    "finished": "1 once the last step is done.",
    "acceptance_length": "Tokens kept per pass of the target, measured last while it trained.",
}
"""Fields of progress.json and what they mean."""

NAMES = {"tokens_per_s": "tokens_per_second", "acceptance_length": "acceptance_length_tokens"}
"""Where the metric has another name than the field."""


class TrainingCollector(Collector):
    """A scrape reads what `look` saw last, so it waits for no storage."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._shown: tuple[Run, str] | None = None
        self._progress: Progress | None = None
        self._acceptance: float | None = None

    def show(self, run: Run, drafter: str) -> None:
        """From now on this training, until the next."""
        with self._lock:
            self._shown = run, drafter
            self._progress = self._acceptance = None

    def __str__(self) -> str:
        """`drafter default of run first: step 40/1,100, loss 2.1`."""
        with self._lock:
            shown, progress = self._shown, self._progress
        if shown is None:
            return "no training yet"
        return f"drafter {shown[1]} of run {shown[0].name}: {progress or 'no step yet'}"

    def look(self) -> None:
        """Read what the training and the latest evaluation wrote. May wait for the storage."""
        if self._shown is None:
            return
        run, drafter = shown = self._shown
        progress, acceptance = Progress.read(run, drafter), _acceptance_length(run, drafter)
        with self._lock:
            if shown == self._shown:
                self._progress, self._acceptance = progress, acceptance

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            shown, progress, acceptance = self._shown, self._progress, self._acceptance
        info = self._host, draftfleet.__version__
        yield gauge("draftfleet_trainer_info", "1, with what this trainer is.", {info: 1}, ("host", "version"))
        key = (shown[0].name, shown[1]) if shown else ("", "")
        for field, help_ in FIELDS.items():
            value = getattr(progress, field, None)
            values = {} if value is None else {key: float(value)}
            yield gauge(f"draftfleet_training_{NAMES.get(field, field)}", help_, values, LABELS)
        accuracy = progress.accuracy if progress else []
        yield gauge(
            "draftfleet_training_accuracy_ratio",
            "Share of draft tokens that are the target's, by draft position, from 0.",
            {(*key, str(position)): share for position, share in enumerate(accuracy)},
            (*LABELS, "position"),
        )
        yield gauge(
            "draftfleet_acceptance_length_tokens",
            "Tokens kept per pass of the target in the latest `draftfleet evaluate`, the bonus token included.",
            {} if acceptance is None else {key: acceptance},
            LABELS,
        )

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry would otherwise collect once to learn the names."""
        return iter(())


def _acceptance_length(run: Run, drafter: str) -> float | None:
    """None before the first evaluation."""
    try:
        return float(json.loads((run.drafter_dir(drafter) / EVALUATION).read_bytes())["acceptance_length"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
