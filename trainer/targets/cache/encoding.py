"""What is kept of hidden states: float32, bfloat16, or float8 with a scale for each token and layer."""

# T tokens, N states of a token (the chosen layers and the last), D hidden size of the target

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}

E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-30
"""So that a state of zeros stays one."""


def encode(states: Tensor, name: str) -> dict[str, Tensor]:
    """States (T, N, D) of any floating type, as the tensors that are kept."""
    if name != "float8":
        return {"states": states.to(DTYPES[name])}
    states = states.float()
    scales = (states.abs().amax(-1) / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    return {"states": (states / scales[..., None]).to(torch.float8_e4m3fn), "scales": scales}


def decode(kept: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """What `encode` kept, as states (T, N, D) of this type."""
    if "scales" not in kept:
        return kept["states"].to(dtype)
    return (kept["states"].float() * kept["scales"][..., None]).to(dtype)


def bytes_per_token(name: str, num_states: int, width: int) -> int:
    """Of one token: its states, their scales and its id."""
    scales = 4 * num_states if name == "float8" else 0
    return num_states * width * DTYPES[name].itemsize + scales + 4
