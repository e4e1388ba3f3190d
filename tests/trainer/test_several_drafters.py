"""Several drafters of one run at the same time: real trainers on a real queue, while the run's shards still land."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftfleet import children
from draftfleet.accounting import Accountant
from draftfleet.embedded import Embedded
from draftfleet.queue import TRAIN_QUEUE, connect
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment, load
from draftfleet.status import collect
from trainer import checkpoint
from trainer.progress import Progress
from trainer.tasks import enqueue

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
STEPS = 8


def settings_for(redis_server: Embedded, run: Run, **flags: Any) -> Settings:
    base = {
        "run": run.name,
        "queue.url": redis_server.url,
        "storage.url": run.storage.url,
        "target.path": TINY,
        "trainer.max_steps": STEPS,
        "trainer.batch_tokens": 192,
        "trainer.log_steps": 1,
        "trainer.poll_s": 0.05,
        "dflash.num_layers": 1,
        "dflash.block_size": 4,
        "dflash.anchors": 4,
        "claims.renew_s": 0.5,
    }
    return load(flags=base | flags)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Settings], None]]:
    """`draftfleet trainer` on this node; killed at the end of the test."""
    started: list[subprocess.Popen[bytes]] = []

    def go(settings: Settings) -> None:
        call = [sys.executable, "-m", "draftfleet", "trainer", "--device", "cpu"]
        started.append(children.spawn(call, log=tmp_path / "trainer.log", env=environment(settings)))

    yield go
    for process in started:
        children.stop(process, grace_s=0)
    print((tmp_path / "trainer.log").read_text())


def test_two_trainers_of_one_node_train_two_drafters_of_a_run_that_still_grows(
    *,
    run: Run,
    redis_server: Embedded,
    put_sums: Callable[..., None],
    start: Callable[[Settings], None],
    until: Callable[..., Any],
) -> None:
    put_sums(run, "train-000000", slice(0, 4))
    small, block = (
        settings_for(redis_server, run, **{"trainer.drafter": name, "trainer.algorithm": algorithm})
        for name, algorithm in (("small", "eagle3"), ("block", "dflash"))
    )

    def told(name: str) -> tuple[str, str | None, int]:
        one = collect(small, Accountant(run))["drafters"][name]
        return one["state"], one["trainer"], one["rows_admitted"]

    def waits(name: str) -> bool:
        progress = Progress.read(run, name)
        return progress is not None and progress.waiting and progress.rows_admitted == 4

    def is_finished(name: str) -> bool:
        progress = Progress.read(run, name)
        return progress is not None and progress.finished

    enqueue(small)
    enqueue(block)
    start(small)
    until(lambda: waits("small"), what="the first shard trained on", deadline_s=180)
    assert told("small")[0] == "waits for samples"
    assert told("block") == ("queued", None, 0)
    assert connect(small).llen(TRAIN_QUEUE) == 1

    start(small)
    until(lambda: waits("block"), what="the second trainer at it", deadline_s=180)
    owners = {told(name)[1] for name in ("small", "block")}
    assert len(owners) == 2
    assert None not in owners
    put_sums(run, "train-000001", slice(4, 8))
    run.seal({"prompts": 8})
    until(lambda: all(is_finished(name) for name in ("small", "block")), what="both trained", deadline_s=180)

    assert [told(name)[::2] for name in ("small", "block")] == [("finished", 8), ("finished", 8)]
    for name, algorithm in (("small", "eagle3"), ("block", "dflash")):
        newest = checkpoint.latest(run.drafter_dir(name))
        assert newest is not None
        assert checkpoint.step_of(newest) == STEPS
        assert checkpoint.read(newest).config.algorithm == algorithm
