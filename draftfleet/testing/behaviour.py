"""What a fake server does: its settings, and the faults that were ordered."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Shape = Literal["vllm", "transformers", "openai"]

Kind = Literal[
    "hang",  # never answers
    "close",  # closes the connection without an answer
    "die",  # closes this and every other connection until `alive` is set again
    "status",  # answers with `status`, and `retry_after` as Retry-After
    "abort",  # 200 with finish_reason abort
    "cut",  # the body ends in its middle
    "garbage",  # 200 with a body that is no JSON
    "rename_reasoning",  # the reasoning stands in a field that nobody reads: `thoughts`
    "no_reasoning",  # the answer has no thought, and nothing that looks like one
    "no_usage",  # no count of tokens
    "no_ids",  # no token ids though they were asked for
    "wrong_ids",  # one id fewer than the count says
    "cut_in_thought",  # finish_reason length, content null
    "end_in_thought",  # finish_reason stop, content null
    "other_model",  # from now on the server serves `other`, as after a restart with another model
]


class Fault(BaseModel):
    """One order. Of several that fit a request, the first counts."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    contains: str = Field(default="", description="Only for prompts whose messages contain this text.")
    after: NonNegativeInt = Field(default=0, description="Let this many fitting requests pass first.")
    times: PositiveInt | None = Field(default=None, description="At most this often. Unset: until it is taken back.")
    share: PositiveFloat = Field(default=1.0, le=1, description="Share of fitting requests, evenly spread.")
    status: int = Field(default=500, ge=400, le=599)
    retry_after: str | None = Field(default=None, description="Seconds or an HTTP date, as the header has it.")
    seen: NonNegativeInt = Field(default=0, description="Fitting requests so far.")
    done: NonNegativeInt = Field(default=0, description="Faults so far.")

    def strikes(self, prompt: str) -> bool:
        """Whether this request is hit; counts it."""
        if self.contains not in prompt or (self.times is not None and self.done >= self.times):
            return False
        self.seen += 1
        late = self.seen - self.after
        if late <= 0 or int(late * self.share) == int((late - 1) * self.share):
            return False
        self.done += 1
        return True


class Behaviour(BaseModel):
    """The settings of a fake server. All of them may change while it runs."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    shape: Shape = Field(default="vllm", description="Which server it imitates on the wire.")
    model: str = Field(default="target", description="Name of the model it serves.")
    tokenizer: str | None = Field(
        default=None, description="Folder of a tokenizer. Unset: ids are counted words, as no real tokenizer has them."
    )
    max_model_len: PositiveInt | None = Field(default=None, description="Longest prompt + completion in tokens.")
    slots: PositiveInt | None = Field(default=None, description="Requests at work at once; more of them queue.")
    latency_s: NonNegativeFloat = Field(default=0, description="Time of every answer.")
    seconds_per_token: NonNegativeFloat = Field(default=0, description="Time of every token of an answer.")
    tokens: PositiveInt = Field(default=48, description="Mean length of an answer.")
    spread: NonNegativeFloat = Field(
        default=0.5, description="How far lengths differ: sigma of a log-normal; 0: not at all."
    )
    api_key: str | None = Field(default=None, description="Requests without this bearer token get 401.")
    ready: bool = Field(default=True, description="Unset: it is loading, and answers 503.")
    alive: bool = Field(default=True, description="Unset: it closes every connection, as a dead process behind a port.")
    faults: list[Fault] = Field(default_factory=list[Fault])

    def fault(self, prompt: str) -> Fault | None:
        """The fault that hits this request, if any."""
        return next((fault for fault in self.faults if fault.strikes(prompt)), None)
