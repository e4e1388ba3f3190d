"""[sampling]: what is asked of the target."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveInt

from draftfleet.settings.section import Section


class Sampling(Section):
    """What is asked of the target. All of it is pinned in run.json."""

    max_tokens: PositiveInt = Field(default=8192, description="Longest completion in tokens, reasoning included.")
    temperature: NonNegativeFloat | None = Field(default=None, description="Unset: the server's own default.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Unset: the server's own default.")
    thinking: bool | None = Field(
        default=None, description="Reasoning on or off through the chat template. Unset: the template decides."
    )
    seed: int | None = Field(
        default=None, description="Each row's seed derives from this and its key. Unset: none is sent."
    )
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Anything else, sent as it is.")
