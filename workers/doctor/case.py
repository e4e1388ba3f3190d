"""What is being looked at, and what earlier looks found that later ones need."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftfleet import drawing
from draftfleet.live import WorkerReport
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Sampling, Settings
from draftfleet.tokens import TargetTokenizer
from workers.batch import Content
from workers.dialects import Completion, Dialect
from workers.gauges import Gauges

PROMPTS = 8

FirstPrompts = Callable[[Settings, int], list[Prompt]]
"""The first prompts of `producer.data`. May raise DataError or SettingsError."""

Pins = Callable[[Settings], tuple[dict[str, Any], Mapping[str, Any]]]
"""What a run made with these settings would pin, and what holds for knobs that an older run does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds that may be taken: by a look, by one that waits for answers of servers, by one of these answers, and by
    workers that are asked who they are."""

    ping_s: float = 1.5
    look_s: float = 12.0
    canary_s: float = 38.0
    answer_s: float = 20.0


@dataclass(slots=True)
class Seen:
    """A server that answered: what it says of itself. `model` is the one that is asked for; None if it is not there."""

    url: str
    dialect: Dialect
    model: str | None
    entry: dict[str, Any]
    metrics: str
    gauges: Gauges | None
    version: str
    models: dict[str, Any]
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of the canary with its answer, or what came instead of one."""

    server: str
    prompt: Prompt
    max_tokens: int
    seconds: float
    completion: Completion | None = None
    message: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ids: tuple[int, ...] = ()
    ids_source: str = "none"
    error: Exception | None = None

    @property
    def is_cut_by_us(self) -> bool:
        """It ended at our own limit, which may be lower than the run's."""
        return self.completion is not None and self.completion.completion_tokens >= self.max_tokens


@dataclass(slots=True, kw_only=True)
class Case:
    """The first fields are given, the others found. `now` is this node's clock."""

    settings: Settings
    file: str = ""
    first_prompts: FirstPrompts | None = None
    pins: Pins | None = None
    now: Callable[[], float] = time.time
    limits: Limits = field(default_factory=Limits)
    run: Run | None = None
    content: Content | None = None
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    prompts_from: str = ""
    tokenizer: TargetTokenizer | None = None
    seen: list[Seen] = field(default_factory=list[Seen])
    workers: list[WorkerReport] = field(default_factory=list[WorkerReport])
    asked: list[Asked] = field(default_factory=list[Asked])
    free_bytes: int | None = None
    redis_info: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def model(self) -> str:
        """What is asked for: the run's model, else that of the settings, else the first that a server serves."""
        if self.content is not None:
            return self.content.model
        return self.settings.model or next((seen.model for seen in self.seen if seen.model), "")

    @property
    def sampling(self) -> Sampling:
        """The run's own. A worker's settings have no say in it."""
        return self.content.sampling if self.content is not None else self.settings.sampling

    def sampling_for(self, prompt: Prompt) -> Sampling:
        """What its row draws where the run asks in several ways."""
        return drawing.drawn(self.sampling, prompt.row_key)[0]

    @property
    def max_tokens(self) -> int:
        """Of the longest answer that any row may give."""
        return drawing.max_tokens(self.sampling)

    @property
    def ready(self) -> list[Seen]:
        """The servers that answered and serve the model."""
        return [seen for seen in self.seen if seen.model]
