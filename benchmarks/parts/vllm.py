"""Real vLLM on a CPU, from the environment that `make referee` makes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from draftfleet import children
from draftfleet.ports import free_port

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Started:
    url: str
    pid: int
    """Of the first of its processes, which all share a session."""


@contextmanager
def started(model: Path, *options: str, log: Path, ready_s: float) -> Generator[Started]:
    """Once it is ready. It is stopped at the end, with its engines."""
    python = os.environ.get("REFEREE_PYTHON", str(ROOT / ".venv-referee/bin/python"))
    if not Path(python).exists():
        sys.exit(f"{python} is not there: `make referee` makes it, or REFEREE_PYTHON names a Python that has vLLM.")
    port = free_port()
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-num-seqs", "32", *options]
    child = children.spawn(argv, log=log, env=os.environ | ENVIRONMENT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + ready_s
        while not _is_ready(url):
            if child.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"vLLM did not start; its log ({log}) says:\n{children.last_lines(log)}")
            time.sleep(0.5)
        yield Started(url, child.pid)
    finally:
        children.stop(child)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
