"""The memory of this node's GPUs, as nvidia-smi tells it, and who holds it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from workers.doctor.case import Case
from workers.doctor.findings import Finding, ok, skipped, warning

MUCH = 0.5
SERVERS = ("vllm", "sglang", "llama", "transformers")
"""Stand in the names of processes that serve a model: theirs is the memory's purpose."""

_GPUS = "--query-gpu=index,uuid,name,memory.used,memory.total"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"


@dataclass(frozen=True, slots=True)
class _Gpu:
    index: str
    uuid: str
    name: str
    used_mib: float
    total_mib: float


def look(case: Case) -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield skipped("memory", "nvidia-smi is not on PATH: no NVIDIA GPU here, or its driver is not installed")
        return
    limit_s = case.limits.look_s - 1
    try:
        gpus = [_gpu(row) for row in _rows(program, _GPUS, limit_s)]
        held = _rows(program, _PROCESSES, limit_s)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        yield skipped("memory", f"nvidia-smi cannot be read: {error}")
        return
    for gpu in gpus:
        yield _memory(gpu, [row[1:] for row in held if row[0] == gpu.uuid])


def _memory(gpu: _Gpu, held: list[list[str]]) -> Finding:
    foreign = [row for row in held if not any(name in row[1].lower() for name in SERVERS)]
    share = gpu.used_mib / gpu.total_mib if gpu.total_mib else 0.0
    listed = (
        ", ".join(f"pid {pid} {name} {_gib(memory)}" for pid, name, memory in held) or "by no process that is shown"
    )
    found = f"GPU {gpu.index} ({gpu.name}): {gpu.used_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB held, {listed}"
    values = {"gpu": gpu.index, "used_mib": gpu.used_mib, "total_mib": gpu.total_mib, "pids": [row[0] for row in held]}
    if share > MUCH and (foreign or not held):
        pids = " ".join(row[0] for row in foreign)
        fix = f"`ps -fp {pids.replace(' ', ',')}`, then end what should not be there" if pids else "`nvidia-smi`"
        return warning("memory", found, f"{fix}; a trainer takes another with trainer.device = cuda:N", **values)
    return ok("memory", found, **values)


def _rows(program: str, query: str, limit_s: float) -> list[list[str]]:
    """The lines of a query, as lists of fields."""
    command = [program, query, "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=limit_s / 2, check=True)
    return [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines() if line.strip()]


def _gpu(row: list[str]) -> _Gpu:
    index, uuid, name, used, total = row
    return _Gpu(index, uuid, name, float(used), float(total))


def _gib(mib: str) -> str:
    try:
        return f"{float(mib) / 1024:.1f} GiB"
    except ValueError:  # in a container it may not be told
        return "of unknown size"
