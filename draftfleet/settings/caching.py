"""[cache]: hidden states that are kept on a disk, where trainer.target = cache."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from draftfleet.settings.section import Section


class Cache(Section):
    """Hidden states kept on a disk from the first epoch on, where trainer.target = cache. Of the node that trains."""

    source: Literal["hf", "vllm"] = Field(
        default="hf", description="The target that captures what is not there yet: as `trainer.target` names it."
    )
    dir: str = Field(
        default="", description="Folder of this node that they are kept in. Empty: RUN/hidden-states in the storage."
    )
    dtype: Literal["bfloat16", "float8", "float32"] = Field(
        default="bfloat16",
        description="What is kept of each number. float8: E4M3 with a scale for each token and layer, half as large.",
    )
    quota_gb: PositiveFloat = Field(
        default=100, description="The most that the folder may hold, in GB; what exceeds it is captured in each epoch."
    )
