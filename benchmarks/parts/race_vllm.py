"""Real vLLM on a CPU with a drafter of whichever trainer: what it accepts, and how fast it answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from parts import vllm
from parts.vllm import Started

from workers.bench import counters
from workers.bench.counters import Acceptance, Counters

READY_S = 900
NAME = "tiny-target"
OPTIONS = ("--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "1024")


@dataclass(frozen=True, slots=True)
class Served:
    """What a server answered to a set of prompts, and what its counters gained meanwhile."""

    tokens: int
    seconds: float
    cpu_s: float
    drafts: int
    accepted: list[int]  # by position
    answers: list[list[int]]


@contextmanager
def server(target: Path, log: Path, drafter: Path | None = None, algorithm: str = "", k: int = 0) -> Generator[Started]:
    """Once it is ready."""
    speculation = {"method": algorithm, "model": str(drafter), "num_speculative_tokens": k}
    more = () if drafter is None else ("--speculative-config", json.dumps(speculation))
    with vllm.started(target, *OPTIONS, *more, log=log, ready_s=READY_S) as started:
        yield started


def ask(server: Started, prompts: list[list[int]], *, max_tokens: int, concurrency: int) -> Served:
    """Greedy answers to all prompts, `concurrency` of them at any time."""
    with httpx.Client(base_url=server.url, timeout=600) as client, ThreadPoolExecutor(concurrency) as pool:

        def answer(prompt: list[int]) -> list[int]:
            body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            said = client.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status().json()
            return said["choices"][0]["token_ids"]

        before, began, computed = _counters(client), time.perf_counter(), cpu_s(server)
        answers = list(pool.map(answer, prompts))
        seconds, busy_s = time.perf_counter() - began, cpu_s(server) - computed
        gained = _counters(client).since(before) or Acceptance("counters")
    return Served(sum(map(len, answers)), seconds, busy_s, gained.drafts, list(gained.per_position), answers)


def cpu_s(server: Started) -> float:
    """Seconds that its processes have computed, those that ended left out."""
    return sum(_cpu_s_if_of(server.pid, folder) for folder in Path("/proc").iterdir() if folder.name.isdigit())


def _cpu_s_if_of(session: int, folder: Path) -> float:
    try:
        fields = (folder / "stat").read_text().rpartition(") ")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if int(fields[3]) == session else 0.0


def _counters(client: httpx.Client) -> Counters:
    return counters.read(client.get("/metrics").raise_for_status().text)


def row_of(groups: list[Served]) -> dict[str, Any]:
    """Of all groups together, and drafts and accepted tokens of each."""
    drafts, accepted = [one.drafts for one in groups], [sum(one.accepted) for one in groups]
    return {
        "acceptance": 1 + sum(accepted) / sum(drafts),
        "drafts": drafts,
        "accepted": accepted,
        "by_position": [sum(kept) for kept in zip(*(one.accepted for one in groups), strict=True)],
        "tokens": sum(one.tokens for one in groups),
        "seconds": sum(one.seconds for one in groups),
    }
