"""CPU of the worker process per request, from the queue to the Parquet shard, with servers that answer at once.

    python benchmarks/client_cpu.py
    python benchmarks/client_cpu.py --profile profile.txt      where py-spy is installed

Two figures in one run, each on a run of its own with a worker of its own:

* seconds of CPU per 1,000 requests with answers of 1,800 tokens, ids included; the bar is 3 s
* requests per core-second with answers of 50 tokens; the bar is 400

The servers are processes of their own that send one prebuilt answer again and again, so neither they nor Redis count:
only the user and system time of the worker's process does, all its threads together. The time it takes to start is left
out. A first round of rows opens connections and warms caches, and is left out too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from draftfleet.embedded import Embedded
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing.workers import WorkerProcess, enqueue

MODEL = "instant"
PROMPT_TOKENS = 200
WORD = " river"


@dataclass(frozen=True, slots=True)
class Figure:
    tokens: int
    rows: int
    seconds: float
    user_s: float
    system_s: float

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.system_s

    @property
    def per_thousand_s(self) -> float:
        return 1000 * self.cpu_s / self.rows

    @property
    def per_core_s(self) -> float:
        return self.rows / self.cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5120, help="per figure")
    parser.add_argument("--warm-rows", type=int, default=640, help="before each figure, not counted")
    parser.add_argument("--servers", type=int, default=7)
    parser.add_argument("--concurrency", type=int, default=48, help="requests in flight per server")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1800, 50], help="one figure for each length")
    parser.add_argument("--profile", type=Path, help="folded stacks of the first figure, by py-spy")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the worker")
    knobs = parser.parse_args()
    figures = [
        _measure(knobs, tokens, knobs.profile if not number else None) for number, tokens in enumerate(knobs.tokens)
    ]
    print(f"{knobs.servers} servers x {knobs.concurrency} slots, {knobs.rows} rows in batches of {knobs.batch_size}\n")
    print("| answer | CPU per 1,000 requests | of it user / system | requests per core-second | requests/s |")
    print("|---|---|---|---|---|")
    for one in figures:
        share = f"{1000 * one.user_s / one.rows:.2f} / {1000 * one.system_s / one.rows:.2f} s"
        rate = f"{one.per_core_s:.0f} | {one.rows / one.seconds:.0f}"
        print(f"| {one.tokens} tokens | {one.per_thousand_s:.2f} s | {share} | {rate} |")
    print("\n" + json.dumps([asdict(figure) for figure in figures]))


def _measure(knobs: argparse.Namespace, tokens: int, profile: Path | None) -> Figure:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = [stack.enter_context(_Instant(tokens)).url for _ in range(knobs.servers)]
        redis_server = stack.enter_context(Embedded(folder / "redis"))
        storage = FileStorage(folder / "storage")
        flags = {
            "queue.url": redis_server.url,
            "storage.url": storage.url,
            "target.model": MODEL,
            "worker.servers": urls,
            "worker.concurrency": knobs.concurrency,
        }
        settings = load(flags=flags | dict(one.split("=", 1) for one in knobs.set))
        run = Run.create(storage, "bench", {"target.model": MODEL, "sampling.max_tokens": 32_000}, {})
        worker = stack.enter_context(WorkerProcess(settings, folder / "worker.log"))
        _until(lambda: worker.said("worker started"), worker.log)

        def answered(first: int, rows: int) -> None:
            prompts = [_prompt(number) for number in range(first, first + rows)]
            names = enqueue(settings, run, prompts, batch_size=knobs.batch_size)
            _until(lambda: set(names) <= set(run.done()), worker.log)

        answered(0, knobs.warm_rows)
        process = psutil.Process(worker.pid)
        before, clock = process.cpu_times(), time.monotonic()
        with ExitStack() as spying:
            if profile:
                spying.enter_context(_spied(worker.pid, profile))
            answered(knobs.warm_rows, knobs.rows)
            seconds, after = time.monotonic() - clock, process.cpu_times()
        counts = [run.counts(name) for name in run.done()]
        assert sum(one.ok for one in counts) == knobs.rows + knobs.warm_rows
        assert not any(one.mismatched for one in counts)
        return Figure(tokens, knobs.rows, seconds, after.user - before.user, after.system - before.system)


def _prompt(number: int) -> Prompt:
    messages = [{"role": "user", "content": f"Question {number}: " + "what comes next in this series? " * 25}]
    return Prompt(prompt_id(messages, None), "train", messages)


class _spied(ExitStack):
    """py-spy beside the worker: 200 looks a second, of threads that hold the GIL."""

    def __init__(self, pid: int, output: Path) -> None:
        super().__init__()
        command = ["py-spy", "record", "--pid", str(pid), "--output", str(output), "--format", "raw", "--threads"]
        self._child = subprocess.Popen(
            [*command, "--gil", "--rate", "200", "--duration", "3600"], stderr=subprocess.DEVNULL
        )
        self.callback(self._end)

    def _end(self) -> None:
        self._child.send_signal(2)
        self._child.wait()


class _Instant:
    """One server as a child process; gone with this context."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __enter__(self) -> _Instant:
        command = [sys.executable, __file__, "--instant-server", str(self._tokens)]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self.url = self._child.stdout.readline().strip()
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()


async def _serve(tokens: int) -> None:
    answer = json.dumps(_answer(tokens)).encode()
    models = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 65536}]}

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response(models)

    async def gauges(request: web.Request) -> web.Response:
        label = f'{{model_name="{MODEL}"}}'
        return web.Response(text=f"vllm:num_requests_running{label} 0.0\nvllm:num_requests_waiting{label} 0.0\n")

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/metrics", gauges)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def _answer(tokens: int) -> dict[str, Any]:
    """As vLLM writes it, with the ids that a real vocabulary has: five digits each, most of them."""
    ids = [(7919 * (number + 1)) % 151_000 for number in range(tokens)]
    thought, said = tokens // 2, tokens - tokens // 2
    message = {"role": "assistant", "reasoning": WORD * thought, "content": WORD * said, "tool_calls": []}
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": MODEL,
        "choices": [
            {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None, "token_ids": ids}
        ],
        "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens},
        "prompt_token_ids": ids[:PROMPT_TOKENS] + [1] * max(0, PROMPT_TOKENS - tokens),
    }  # fmt: skip


def _until(condition: Callable[[], Any], log: Path) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, f"took more than ten minutes:\n{log.read_text()[-3000:]}"
        time.sleep(0.1)


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    if arguments[:1] == ["--instant-server"]:
        asyncio.run(_serve(int(arguments[1])))
    else:
        main()
