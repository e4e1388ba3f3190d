"""A batch in the hands of this process, and its rows."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from draftfleet import drawing
from draftfleet.claims import Claims, Holding
from draftfleet.conversations import asks_every_turn
from draftfleet.outcomes import Counts
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Sampling
from workers import conversation

SUSPECT_DEATHS = 1
"""A server that ended takes all its rows down, and any of them may be the reason."""

SUSPECT_BREAKS = 2
"""Connections that broke though the server was there at the next look: it may have come back that fast, or not."""

ACCUSED_DEATHS = 2
"""It was the only suspect of its server, but not the only row."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the run pins about its requests. A worker's own settings have no say in it."""

    model: str
    sampling: Sampling
    every_turn: bool = False
    """Whether each assistant turn of a conversation is asked, or the last alone."""

    @classmethod
    def of(cls, run: Run) -> Content:
        """Raises RunError if the run was made by a version that pins what this one does not know."""
        return cls(drawing.model(run), drawing.asked(run), asks_every_turn(run))

    def sampling_for(self, row_key: str) -> Sampling:
        """What a row is asked with: its variant of the mixture, thinking on or off."""
        return drawing.drawn(self.sampling, row_key)[0]

    def drawn(self, row_key: str) -> dict[str, Any] | None:
        """What of it the row has drawn; None where the run leaves no choice."""
        return drawing.drawn(self.sampling, row_key)[1] or None


@dataclass(slots=True, eq=False)
class Row:
    """A prompt that has not been answered yet. Changed by the pool only, in the event loop.

    `asked` is the turn of it that is asked: the prompt itself, unless each turn of a conversation is. Everything else
    here is of that turn alone. `prefer` is the server that has what came before it in its cache.
    `tries` are requests that ended in a transient fault, `breaks` those of them whose connection broke in mid-answer.
    `deaths` are servers that ended while they worked on it. A suspect is kept from other suspects; an accused row gets
    a server to itself, and if that ends as well, it is the row. A node that reboots twice convicts nobody.
    `generated` are the tokens of its turns that ended here.
    """

    batch: Batch
    prompt: Prompt
    prompt_tokens: int | None = None
    tries: int = 0
    breaks: int = 0
    deaths: int = 0
    avoid: str = ""
    prefer: str = ""
    generated: int = 0
    since: float = field(default_factory=time.monotonic)
    asked: Prompt = field(init=False)

    def __post_init__(self) -> None:
        begun = self.batch.begun.get(self.prompt.row_key)
        self.asked = conversation.first(self.prompt, begun) if self.batch.content.every_turn else self.prompt

    @property
    def sampling(self) -> Sampling:
        """What it is asked with."""
        return self.batch.content.sampling_for(self.prompt.row_key)

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS or self.breaks >= SUSPECT_BREAKS

    @property
    def is_accused(self) -> bool:
        return self.deaths >= ACCUSED_DEATHS

    def cost(self, sample: Sample) -> tuple[int, float]:
        """Tokens and seconds of an answer; of one that went on, without what was there."""
        unfinished = self.asked.unfinished
        if unfinished is None:
            return sample.completion_tokens, sample.seconds
        return sample.completion_tokens - len(unfinished.token_ids), sample.seconds - unfinished.seconds

    def answered(self, sample: Sample) -> Sample:
        """Turn to what is asked next. Returns what is kept: the sample, or, where a turn follows, what there is."""
        if not self.batch.content.every_turn:
            return sample
        following = conversation.following(self.prompt, self.asked, sample)
        if not isinstance(following, Prompt):
            return replace(sample, ended=following)
        self.asked, self.prompt_tokens = following, None
        self.tries = self.breaks = self.deaths = 0
        self.avoid, self.prefer = "", sample.server
        return conversation.unfinished(sample, following)

    def moved(self) -> float:
        """It begins to wait, or to be asked. Returns for how many seconds it did the other."""
        before, self.since = self.since, time.monotonic()
        return self.since - before


@dataclass(slots=True, eq=False)
class Batch:
    """Rows are finished in the event loop; the task's thread waits; chores read. `_lock` guards the rows."""

    name: str
    run: Run
    content: Content
    claims: Claims
    token: str
    attempt: int
    task_id: str
    taken_at: float = field(default_factory=time.monotonic)
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    is_submitted: bool = False
    finished: dict[str, Sample] = field(default_factory=dict[str, Sample])
    begun: dict[str, Sample] = field(default_factory=dict[str, Sample])
    """Conversations with turns that are finished and others that are not."""
    stopped: str | None = None
    is_retired: bool = False
    num_saved: int = 0
    _unsaved: dict[str, Sample] = field(default_factory=dict[str, Sample])
    _is_open: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> tuple[str, str]:
        return self.run.run_id, self.name

    @property
    def holding(self) -> Holding:
        """Only rows saved under this claim count as its progress, not those that earlier holders left."""
        return Holding(self.token, self.num_saved)

    @property
    def is_complete(self) -> bool:
        return self._is_open and len(self.finished) == len(self.prompts)

    def open(self, prompts: list[Prompt], earlier: dict[str, Sample]) -> None:
        """Begin with what is to be done, and what earlier holders finished of it."""
        with self._lock:
            self.prompts = prompts
            for key, sample in earlier.items():
                (self.begun if sample.outcome == "unfinished" else self.finished)[key] = sample
            self._is_open = True
        self._end_if_complete()

    def finish(self, sample: Sample) -> None:
        """Keep what became of a row, or of a conversation so far."""
        key = sample.row_key
        with self._lock:
            if key in self.finished:
                return
            if sample.outcome == "unfinished":
                self.begun[key] = sample
            else:
                self.finished[key] = sample
                self.begun.pop(key, None)
            self._unsaved[key] = sample
        self._end_if_complete()

    def stop(self, reason: str) -> None:
        """End the waiting of the task's thread, whatever is finished by now."""
        self.stopped = self.stopped or reason
        self._ended.set()

    def wait(self) -> bool:
        """Until it is complete (True) or stopped (False)."""
        self._ended.wait()
        return self.is_complete

    def unsaved(self) -> list[Sample]:
        """Rows that stand in no partial yet."""
        with self._lock:
            return list(self._unsaved.values())

    def saved(self, samples: list[Sample]) -> None:
        """These are on storage. What was added to one of them since then is not."""
        with self._lock:
            for sample in samples:
                if self._unsaved.get(sample.row_key) is sample:
                    del self._unsaved[sample.row_key]
            self.num_saved += len(samples)

    def samples(self) -> list[Sample]:
        """Every row's, in the order of the prompts."""
        return [self.finished[prompt.row_key] for prompt in self.prompts]

    def counts(self) -> Counts:
        with self._lock:
            return Counts.of(self.finished.values())

    def _end_if_complete(self) -> None:
        if self.is_complete:
            self._ended.set()
