"""Where the target and the drafter compute, and in which precision."""

from __future__ import annotations

import os

import psutil
import torch

from draftfleet.errors import SettingsError


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Under torchrun each process has the GPU of its number.

    On a CPU torch gets half of the cores, unless OMP_NUM_THREADS says how many threads it may have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in {"cpu", "cuda"}:
        raise SettingsError(f"trainer.device = {name}: use auto, cpu or cuda.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SettingsError(
                f"trainer.device = {name}: torch {torch.__version__} sees no GPU here; use auto or cpu."
            )
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise SettingsError(
                f"trainer.device = {name}: this process would have GPU {device.index}, but there are "
                f"{torch.cuda.device_count()} here: set trainer.processes to the number of GPUs at most."
            )
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        # Workers and servers run beside it, and threads that wait for a busy core cost more than they bring: on two
        # shared cores two threads trained at 175 tokens/s, one at 835 or more.
        torch.set_num_threads(max(1, (psutil.cpu_count(logical=False) or 2) // 2))
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU; a CPU is exact in float32, and seldom faster without."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)
