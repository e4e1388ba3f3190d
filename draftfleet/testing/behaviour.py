"""What a fake server does: its settings, and the faults that were ordered."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Shape = Literal["vllm", "vllm-0.10", "sglang", "llamacpp", "transformers", "ollama", "openai"]

Kind = Literal[
    "hang",  # never answers
    "close",  # closes the connection without an answer
    "die",  # closes this and every other connection until `alive` is set again, or for `restart_s`
    "stall",  # nothing in flight advances, all counters are flat, for `for_s` or until `frozen` is unset
    "ghost",  # forgets this request and all in flight: no gauge shows them, and none is ever answered
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

OF_THE_SERVER = ("die", "stall", "ghost", "other_model")
"""Faults that need no request to strike."""


class Fault(BaseModel):
    """One order. Of several that fit a request, the first counts."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    contains: str = Field(default="", description="Only for prompts whose messages contain this text.")
    after: NonNegativeInt = Field(default=0, description="Let this many fitting requests pass first.")
    times: PositiveInt | None = Field(default=None, description="At most this often. Unset: until it is taken back.")
    share: PositiveFloat = Field(default=1.0, le=1, description="Share of fitting requests, evenly spread.")
    status: int = Field(default=500, ge=400, le=599, description="Of kind `status`: the HTTP status.")
    retry_after: str | None = Field(
        default=None, description="Of kind `status`: the header Retry-After, as it is written there."
    )
    retry_after_date_s: NonNegativeFloat | None = Field(
        default=None, description="Of kind `status`: so many real seconds from then, written as an HTTP date."
    )
    restart_s: NonNegativeFloat | None = Field(
        default=None, description="Of kinds `die`, `other_model`: it is down so long. Unset: `die` is for ever."
    )
    for_s: NonNegativeFloat | None = Field(default=None, description="Of kind `stall`: it ends by itself after this.")
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
    api_key: str | None = Field(default=None, description="Requests without this bearer token get 401.")
    tokens: PositiveInt = Field(default=48, description="Mean length of an answer.")
    spread: NonNegativeFloat = Field(
        default=0.5, description="How far lengths differ: sigma of a log-normal; 0: not at all."
    )
    most_tokens: PositiveInt = Field(default=16_384, le=16_384, description="No answer is longer than this.")
    slots: PositiveInt | None = Field(default=None, description="Requests at work at once; more of them queue.")
    kv_tokens: PositiveInt | None = Field(
        default=None, description="Tokens that fit into the KV cache; beyond it requests are preempted."
    )
    latency_s: NonNegativeFloat = Field(default=0, description="Time of every answer, before its first token.")
    seconds_per_prompt_token: NonNegativeFloat = Field(default=0, description="Time of every token of a prompt.")
    seconds_per_token: NonNegativeFloat = Field(default=0, description="Time of every token of an answer.")
    half_speed_at: PositiveFloat | None = Field(
        default=None, description="So many other requests at work halve the speed of each. Unset: none slows another."
    )
    speed: PositiveFloat = Field(default=1.0, description="Of its engine: with 0.5 every answer takes twice as long.")
    draft_tokens: PositiveInt | None = Field(
        default=None, description="It counts drafts of so many tokens, as with a drafter. Unset: none."
    )
    keep: float = Field(
        default=0.7, ge=0, le=1, description="Chance that a drafted token is kept, if those before it were."
    )
    time_scale: PositiveFloat = Field(default=1.0, description="All times above and below are divided by this.")
    load_s: NonNegativeFloat = Field(default=0, description="It loads so long after each start, and answers 503.")
    frozen: bool = Field(default=False, description="Set: nothing in flight advances, all counters are flat.")
    ready: bool = Field(default=True, description="Unset: it is loading, and answers 503.")
    alive: bool = Field(default=True, description="Unset: it closes every connection, as a dead process behind a port.")
    faults: list[Fault] = Field(
        default_factory=list[Fault], description="What was ordered; the first that fits a request counts."
    )

    def fault(self, prompt: str) -> Fault | None:
        """The fault that hits this request, if any."""
        return next((fault for fault in self.faults if fault.strikes(prompt)), None)
