"""Fixtures for every test: a real Valkey, a storage folder, settings that point at both, and a small run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftfleet.embedded import Embedded
from draftfleet.names import Split, batch_id
from draftfleet.records import Prompt, Sample, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MODEL = "tiny"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DRAFTFLEET_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Embedded]:
    with Embedded(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    return FileStorage(tmp_path / "storage")


@pytest.fixture
def settings(redis_server: Embedded, storage: FileStorage) -> Settings:
    return load(flags={"queue.url": redis_server.url, "storage.url": storage.url, "target.model": MODEL, "run": "run"})


@pytest.fixture
def run(storage: FileStorage) -> Run:
    return Run.create(storage, "run", {"target.model": MODEL, "sampling.max_tokens": 64}, {})


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until


def wait_until(condition: Callable[[], Any], *, what: str = "", deadline_s: float = 60) -> Any:
    """The first true value of `condition`; fails the test at the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"did not happen within {deadline_s} s: {what or condition}")


@pytest.fixture
def make_prompts() -> Callable[..., list[Prompt]]:
    def make(count: int, *, split: Split = "train", start: int = 0) -> list[Prompt]:
        conversations = [[{"role": "user", "content": f"Question {start + i}?"}] for i in range(count)]
        return [Prompt(prompt_id(messages, None), split, messages) for messages in conversations]

    return make


@pytest.fixture
def make_sample(run: Run) -> Callable[..., Sample]:
    def make(prompt: Prompt, batch: str = batch_id("train", 0), **fields: Any) -> Sample:
        ids = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9, 2], "ids_source": "engine", "completion_tokens": 3}
        values = {"outcome": "ok", "finish_reason": "stop", "content": "Answer.", "prompt_tokens": 3, **ids, **fields}
        return Sample(
            run_id=run.run_id,
            run=run.name,
            batch=batch,
            row_key=prompt.row_key,
            prompt_id=prompt.prompt_id,
            split=prompt.split,
            messages=prompt.messages,
            **values,
        )

    return make
