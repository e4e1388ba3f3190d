"""One file of hidden states: is it what was asked for?"""

# T tokens, n layers asked for, D hidden size of the target

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftfleet.errors import Mismatch

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Torn(Mismatch):
    """The file is not there or not whole: the server failed to write it."""


@dataclass(frozen=True, slots=True)
class Form:
    """What every file must be. `dtype` and `model` are not known before a server has been looked at."""

    layers: list[int]  # as the engine counts them
    width: int
    dtype: torch.dtype | None = None
    model: str = ""  # the name that it is served under

    def num_bytes(self, num_tokens: int) -> int:
        """Of the file of a row: states, 8 bytes of id a token, and the header."""
        assert self.dtype is not None
        return num_tokens * (len(self.layers) * self.width * self.dtype.itemsize + 8) + 4096


def check(file: Path, ids: Tensor, form: Form) -> torch.dtype:
    """Ids, shape and dtype, without reading the states. Returns the dtype. Raises Mismatch."""
    with _open(file) as tensors:
        found = set(tensors.keys())
        if not {"hidden_states", "token_ids"} <= found:
            raise Mismatch(f"it holds {', '.join(sorted(found)) or 'nothing'}, not hidden_states and token_ids")
        _check_ids(tensors.get_tensor("token_ids"), ids)
        states = tensors.get_slice("hidden_states")
        shape, kind = tuple(states.get_shape()), states.get_dtype()
    _check_shape(shape, len(ids), form)
    if kind not in DTYPES:
        raise Mismatch(f"its states are {kind}: {', '.join(DTYPES)} are known. Serve it without --kv-cache-dtype")
    dtype = DTYPES[kind]
    if form.dtype not in (None, dtype):
        raise Mismatch(f"its states are {dtype}, those of the first row were {form.dtype}: serve all with one --dtype")
    return dtype


def read(file: Path) -> Tensor:
    """(T, n, D). Raises Mismatch if a value is not finite."""
    with _open(file) as tensors:
        states = tensors.get_tensor("hidden_states")
    if not torch.isfinite(states).all():
        rows = (~torch.isfinite(states)).flatten(1).any(1).nonzero()[:, 0].tolist()
        raise Mismatch(
            f"{len(rows)} of {len(states)} positions have values that are not finite, the first is {rows[0]}: "
            "float16 overflows in many models; serve it with --dtype bfloat16"
        )
    return states


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        size = f"{file.stat().st_size} bytes" if file.exists() else "not there"
        raise Torn(f"{file} cannot be read ({size}): {error}") from None


def _check_ids(found: Tensor, ids: Tensor) -> None:
    if len(found) != len(ids):
        raise Mismatch(
            f"it has {len(found)} tokens, {len(ids)} were asked for: is the prefix cache on, or "
            "include_output_tokens, or does the server cut prompts?"
        )
    differ = (found.long() != ids).nonzero()[:, 0].tolist()
    if differ:
        where = differ[0]
        raise Mismatch(
            f"{len(differ)} of {len(ids)} token ids differ from those asked for, the first at position {where}: "
            f"{int(found[where])} instead of {int(ids[where])}. Is another file of that name in the folder, or another "
            "server behind the address?"
        )


def _check_shape(shape: tuple[int, ...], num_tokens: int, form: Form) -> None:
    wanted = (num_tokens, len(form.layers), form.width)
    if shape == wanted:
        return
    what = ["tokens (is the prefix cache on?)", "layers (is it served for another drafter?)", "width (another model?)"]
    wrong = [said for said, a, b in zip(what, shape, wanted, strict=False) if a != b] or ["number of dimensions"]
    raise Mismatch(
        f"its states have the shape {shape}, {wanted} was asked for: (tokens, layers, width) differ in "
        f"{' and in '.join(wrong)}. Layers {form.layers}, as vLLM counts them, must be in --speculative-config"
    )
