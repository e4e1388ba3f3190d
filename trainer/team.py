"""The processes that train one drafter together. One process is a team of one, and talks to nobody."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")


class Team:
    """Process 0 decides and writes; every process computes. Made by `alone` or `join`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        # Decisions are Python objects; they travel over gloo, which needs no GPU, also where gradients use NCCL.
        self._talk = cast(ProcessGroup, dist.new_group(backend="gloo")) if size > 1 else None

    @classmethod
    def alone(cls) -> Team:
        return cls(0, 1)

    @classmethod
    def join(cls, device: torch.device) -> Team:
        """The team that torchrun started this process in, by its environment; a team of one without torchrun."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls.alone()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, value: T | None) -> T:
        """What process 0 holds, on every process. Every process must call it."""
        box = [value]
        if self._talk is not None:
            dist.broadcast_object_list(box, src=0, group=self._talk)
        assert box[0] is not None
        return box[0]

    def add_up(self, gradients: Sequence[Tensor], sums: dict[str, float]) -> dict[str, float]:
        """Replace each gradient by its sum over the processes, and return the sums of the numbers.

        Every process must call it, with the same shapes and names.
        """
        if self.size == 1:
            return sums
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        numbers = torch.tensor(list(sums.values()), dtype=torch.float64, device=flat.device)
        dist.all_reduce(numbers)
        return dict(zip(sums, numbers.tolist(), strict=True))

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
