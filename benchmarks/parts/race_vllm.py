"""Real vLLM on a CPU with a drafter of whichever trainer: what it accepts, and how fast it answers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draftfleet import children
from draftfleet.ports import free_port

ROOT = Path(__file__).parents[2]
READY_S = 900
NAME = "tiny-target"
OPTIONS = (
    *("--host", "127.0.0.1", "--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "1024"),
    *("--enforce-eager", "--max-num-seqs", "32"),
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Served:
    """What a server answered to a set of prompts, and what its counters gained meanwhile."""

    tokens: int
    seconds: float
    cpu_s: float
    drafts: int
    accepted: list[int]  # by position
    answers: list[list[int]]

    @property
    def acceptance_length(self) -> float:
        """The token that the target itself adds is included: 1 + accepted / drafts."""
        return 1 + sum(self.accepted) / max(self.drafts, 1)


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int
    """Of the first of its processes, which all share a session."""

    def cpu_s(self) -> float:
        """Seconds that its processes have computed, those that ended left out."""
        return sum(_cpu_s_if_of(self.pid, folder) for folder in Path("/proc").iterdir() if folder.name.isdigit())


def _cpu_s_if_of(session: int, folder: Path) -> float:
    try:
        fields = (folder / "stat").read_text().rpartition(") ")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if int(fields[3]) == session else 0.0


@contextmanager
def server(target: Path, log: Path, drafter: Path | None = None, algorithm: str = "", k: int = 0) -> Generator[Server]:
    """Once it is ready."""
    python = os.environ.get("REFEREE_PYTHON", str(ROOT / ".venv-referee/bin/python"))
    if not Path(python).exists():
        sys.exit(f"{python} is not there: `make referee` makes it, or REFEREE_PYTHON names a Python that has vLLM.")
    port = free_port()
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--port", str(port), *OPTIONS]
    if drafter is not None:
        speculation = {"method": algorithm, "model": str(drafter), "num_speculative_tokens": k}
        argv += ["--speculative-config", json.dumps(speculation)]
    child = children.spawn(argv, log=log, env=os.environ | ENVIRONMENT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
        while not _is_ready(url):
            if child.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"vLLM did not start; its log ({log}) says:\n{children.last_lines(log)}")
            time.sleep(0.5)
        yield Server(url, child.pid)
    finally:
        children.stop(child)


def ask(server: Server, prompts: list[list[int]], *, max_tokens: int, concurrency: int) -> Served:
    """Greedy answers to all prompts, `concurrency` of them at any time."""
    with httpx.Client(base_url=server.url, timeout=600) as client, ThreadPoolExecutor(concurrency) as pool:

        def answer(prompt: list[int]) -> list[int]:
            body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            said = client.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status().json()
            return said["choices"][0]["token_ids"]

        before, began, computed = _counters(client), time.perf_counter(), server.cpu_s()
        answers = list(pool.map(answer, prompts))
        seconds, cpu_s = time.perf_counter() - began, server.cpu_s() - computed
        gained = {name: value - before.get(name, 0) for name, value in _counters(client).items()}
    accepted = [value for name, value in sorted(gained.items()) if name.startswith("accepted_")]
    return Served(sum(map(len, answers)), seconds, cpu_s, gained.get("drafts", 0), accepted, answers)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def _counters(client: httpx.Client) -> dict[str, int]:
    """Drafts, and accepted tokens by position."""
    values: dict[str, int] = {}
    for line in client.get("/metrics").raise_for_status().text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:spec_decode_num_drafts_total"):
            values["drafts"] = int(float(value))
        elif name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total"):
            position = name.partition('position="')[2].partition('"')[0]
            values[f"accepted_{int(position):02}"] = int(float(value))
    return values


def row_of(served: Served) -> dict[str, Any]:
    return {
        "acceptance": served.acceptance_length,
        "drafts": served.drafts,
        "accepted": served.accepted,
        "tokens": served.tokens,
        "seconds": served.seconds,
    }
