"""Two fake servers, one of which plays to have a drafter, and a run with held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from draftfleet.benching import Options
from draftfleet.names import batch_id
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.testing import FakeServer
from workers.bench import Bench, found

TARGET = Path(__file__).parents[3] / "examples/tiny-target"
DRAFTING = {"draft_tokens": 3, "keep": 0.8, "speed": 20.0}
TIMES = {"seconds_per_token": 0.003, "latency_s": 0.01}


@pytest.fixture
def start() -> Iterator[Callable[..., FakeServer]]:
    """`start(**DRAFTING)`: a server that runs until the test ends."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(FakeServer(**{"model": "tiny", "tokens": 24, **settings}))


@pytest.fixture
def settings(run: Run, make_prompts: Callable[..., list[Prompt]]) -> Settings:
    """Of a run with 12 held-out prompts and a drafter."""
    run.write_prompts(batch_id("heldout", 0), make_prompts(12, split="heldout"))
    run.storage.put("run/drafters/eagle3/drafter-settings.json", b"{}")
    return load(flags={"storage.url": run.storage.url, "run": "run"})


@pytest.fixture
def measure(settings: Settings) -> Callable[..., Bench]:
    """`measure(server, other, **options)` with little to do."""

    def call(server: FakeServer, other: FakeServer | None = None, **options: Any) -> Bench:
        knobs = {"concurrency": (1, 4), "limit": 4, "repeat": 2, "max_tokens": 32, **options}
        without = None if other is None else other.url
        return found(settings, Options(with_url=server.url, without_url=without, **knobs), first_prompts=no_prompts)

    return call


def no_prompts(settings: Settings, count: int) -> list[Prompt]:
    raise AssertionError("a run has prompts of its own")
