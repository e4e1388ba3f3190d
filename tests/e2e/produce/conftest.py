"""`produce` on real files, a real Redis and real processes that are killed."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import redis

from draftfleet.embedded import Embedded
from draftfleet.queue import connect, generate_queue, keys, retry_queue
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage

MODEL = "tiny"

PRODUCE = """
import json, sys
from draftfleet.errors import RunBusy
from draftfleet.settings import load
from producer.produce import produce
try:
    print(produce(load(flags=json.loads(sys.argv[1])), progress=json.loads(sys.argv[2])).to_json())
except RunBusy as error:
    sys.exit(f"busy: {error}")
"""


@pytest.fixture
def flags(redis_server: Embedded, storage: FileStorage) -> dict[str, Any]:
    return {
        "queue.url": redis_server.url,
        "storage.url": storage.url,
        "target.model": MODEL,
        "run": "run",
        "producer.batch_size": 8,
        "producer.heldout": 0.1,
    }


@pytest.fixture
def configure(flags: dict[str, Any]) -> Callable[..., Settings]:
    def make(data: object, **changes: Any) -> Settings:
        return load(
            flags={**flags, "producer.data": str(data), **{k.replace("__", "."): v for k, v in changes.items()}}
        )

    return make


@pytest.fixture
def command(flags: dict[str, Any]) -> Callable[..., list[str]]:
    """The command of a producer in a process of its own."""

    def make(data: Path, *, progress: bool = False) -> list[str]:
        return [
            sys.executable,
            "-c",
            PRODUCE,
            json.dumps({**flags, "producer.data": str(data)}),
            json.dumps(progress),
        ]

    return make


@pytest.fixture
def client(redis_server: Embedded, settings: Settings) -> Iterator[redis.Redis]:
    with connect(settings) as client:
        yield client


@pytest.fixture
def in_thread() -> Callable[[Callable[[], Any]], Future[Any]]:
    def start(work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    return start


@pytest.fixture
def questions() -> Callable[..., list[str]]:
    def make(count: int, start: int = 0) -> list[str]:
        numbers = range(start, start + count)
        return [json.dumps({"prompt": f"What is {number} times {number}?"}) + "\n" for number in numbers]

    return make


@pytest.fixture
def write() -> Callable[[Path, list[str]], Path]:
    def put(path: Path, lines: list[str]) -> Path:
        path.write_text("".join(lines))
        return path

    return put


@pytest.fixture
def contents() -> Callable[[Run], Counter[str]]:
    """How often the run holds each text."""

    def count(run: Run) -> Counter[str]:
        prompts = (prompt for batch in run.batches() for prompt in run.read_prompts(batch))
        return Counter(str(prompt.messages[-1]["content"]) for prompt in prompts)

    return count


@pytest.fixture
def texts() -> Callable[[list[str]], Counter[str]]:
    return lambda lines: Counter(json.loads(line)["prompt"] for line in lines)


@pytest.fixture
def queued() -> Callable[[redis.Redis], list[str]]:
    """Batches in the queue, the first to be consumed first."""

    def names(client: redis.Redis) -> list[str]:
        lists = [*reversed(keys(generate_queue(MODEL))), *reversed(keys(retry_queue(MODEL)))]
        raw = [one for key in lists for one in client.lrange(key, 0, -1)]
        return [json.loads(base64.b64decode(json.loads(one)["body"]))[0][0]["batch"] for one in reversed(raw)]

    return names
