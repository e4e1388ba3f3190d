"""Requests per second and CPU core: the worker's full path against a plain loop with the openai SDK, in one run.

    python benchmarks/worker_throughput.py --rows 6000 --tokens 400

Both ask the same instant fake servers (processes of their own) for the same prompts at the same concurrency. The worker
goes the whole way: Redis, claim, prompt shard, request, parsing, partials, Parquet shard. The plain loop uses one
AsyncOpenAI with the SDK's default transport, awaits `create` and keeps nothing. A core is counted by the process' own
CPU time, so that servers and Redis on the same machine do not matter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from draftfleet.embedded import Embedded
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeProcess
from draftfleet.testing.workers import WorkerProcess, enqueue

MODEL = "instant"


@dataclass(frozen=True, slots=True)
class Figure:
    path: str
    rows: int
    seconds: float
    cpu_s: float

    @property
    def per_core(self) -> float:
        return self.rows / self.cpu_s

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / self.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--tokens", type=int, default=400, help="mean length of an answer")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=48, help="requests in flight per server")
    parser.add_argument("--batch-size", type=int, default=64)
    knobs = parser.parse_args()
    prompts = [_prompt(number) for number in range(knobs.rows)]
    servers = [FakeProcess(model=MODEL, tokens=knobs.tokens, spread=0) for _ in range(knobs.servers)]
    try:
        for server in servers:
            server.__enter__()
        urls = [server.url for server in servers]
        figures = [
            _worker(urls, prompts, knobs.concurrency, knobs.batch_size),
            _plain(urls, prompts, knobs.concurrency, aiohttp=False),
            _plain(urls, prompts, knobs.concurrency, aiohttp=True),
        ]
    finally:
        for server in servers:
            server.kill()
    _print(figures, knobs)


def _prompt(number: int) -> Prompt:
    messages = [{"role": "user", "content": f"Question {number}: " + "what comes next in this series? " * 10}]
    return Prompt(prompt_id(messages, None), "train", messages)


def _worker(urls: Sequence[str], prompts: Sequence[Prompt], concurrency: int, batch_size: int) -> Figure:
    """CPU time and seconds from the first batch taken to the last one done; the start of Python is not counted."""
    with tempfile.TemporaryDirectory() as folder, Embedded(Path(folder) / "redis") as redis_server:
        storage = FileStorage(Path(folder) / "storage")
        flags = {
            "queue.url": redis_server.url,
            "storage.url": storage.url,
            "target.model": MODEL,
            "worker.servers": list(urls),
            "worker.concurrency": concurrency,
        }
        settings = load(flags=flags)
        run = Run.create(storage, "bench", {"target.model": MODEL, "sampling.max_tokens": 32_000}, {})
        with WorkerProcess(settings, Path(folder) / "worker.log") as worker:
            _until(lambda: worker.said("worker started"))
            process = psutil.Process(worker.pid)
            before, clock = _cpu_s(process), time.monotonic()
            names = enqueue(settings, run, prompts, batch_size=batch_size)
            _until(lambda: len(run.done()) == len(names))
            seconds, cpu_s = time.monotonic() - clock, _cpu_s(process) - before
        assert sum(run.counts(name).ok for name in names) == len(prompts)
        return Figure("draftfleet work: queue to Parquet", len(prompts), seconds, cpu_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _until(condition: Any) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "took more than ten minutes"
        time.sleep(0.05)


def _plain(urls: Sequence[str], prompts: Sequence[Prompt], concurrency: int, *, aiohttp: bool) -> Figure:
    """In a process of its own, as the worker is."""
    request = {
        "urls": list(urls), "prompts": [prompt.messages for prompt in prompts],
        "concurrency": concurrency, "aiohttp": aiohttp,
    }  # fmt: skip
    child = subprocess.run(
        [sys.executable, __file__, "--plain-loop"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, cpu_s = json.loads(child.stdout)
    name = "plain openai SDK loop, " + ("aiohttp transport" if aiohttp else "default transport")
    return Figure(name, len(prompts), seconds, cpu_s)


async def _plain_loop(urls: list[str], prompts: list[Any], concurrency: int, aiohttp: bool) -> tuple[float, float]:
    from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient  # noqa: PLC0415  the child's alone

    http = DefaultAioHttpClient() if aiohttp else DefaultAsyncHttpxClient()
    clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0) for url in urls]
    rows = iter(prompts)

    async def slot(client: AsyncOpenAI) -> None:
        for messages in rows:
            await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=32_000, extra_body={"return_token_ids": True}
            )

    before, clock = _own_cpu_s(), time.monotonic()
    await asyncio.gather(*(slot(client) for client in clients for _ in range(concurrency)))
    return time.monotonic() - clock, _own_cpu_s() - before


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _print(figures: Sequence[Figure], knobs: argparse.Namespace) -> None:
    print(f"{knobs.rows} rows of {knobs.tokens} tokens, {knobs.servers} servers x {knobs.concurrency} slots\n")
    print("| path | requests/s | CPU per request | requests/s per core |\n|---|---|---|---|")
    for figure in figures:
        print(
            f"| {figure.path} | {figure.rows / figure.seconds:.0f} | {figure.cpu_ms:.2f} ms | {figure.per_core:.0f} |"
        )
    print("\n" + json.dumps([asdict(figure) | {"requests_per_core_s": figure.per_core} for figure in figures]))


if __name__ == "__main__":
    if sys.argv[1:] == ["--plain-loop"]:
        print(json.dumps(asyncio.run(_plain_loop(**json.load(sys.stdin)))))
    else:
        main()
