"""Hidden states captured ahead: the same training, bounded, and an end to every wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftfleet.errors import TargetError, TrainingError
from draftfleet.runs import Run
from draftfleet.settings import Settings, Trainer, load
from trainer import checkpoint, targets
from trainer.prefetch import Prefetch, depth_of
from trainer.progress import Progress
from trainer.targets import Row
from trainer.team import Team
from trainer.train import fit, train

TINY = Path(__file__).parents[2] / "examples" / "tiny-target"
CPU = torch.device("cpu")


class NoFeed:
    """A feed that has no samples to wait for."""

    waited_s = 0.0
    is_waiting = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def close(self) -> None:
        self.calls.append("close")

    def part(self) -> None:
        self.calls.append("part")


def ahead(captured: Iterator[Any], depth: int, feed: Any = None) -> Prefetch:
    return Prefetch(captured, feed or NoFeed(), depth=depth, device=CPU)


def weights_of(run: Run, drafter: str) -> dict[str, torch.Tensor]:
    held = checkpoint.latest(run.drafter_dir(drafter))
    assert held is not None
    return checkpoint.read(held).tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def settings(run: Run, **trainer: Any) -> Settings:
    knobs = {"max_steps": 8, "batch_tokens": 64, "accumulation": 2, "log_steps": 1, "poll_s": 0.01, "device": "cpu"}
    flags = {f"trainer.{name}": value for name, value in (knobs | trainer).items()}
    small = {"dflash.num_layers": 1, "dflash.block_size": 4, "dflash.mask_token_id": 100}
    return load(flags={"run": run.name, "storage.url": run.storage.url, "target.path": str(TINY), **small, **flags})


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_training_with_states_captured_ahead_ends_with_the_bits_of_one_without(
    run: Run, samples: Any, algorithm: str
) -> None:
    samples.put("train-000000")
    samples.put("train-000001")
    run.seal({})

    for depth in (0, 2):
        assert train(settings(run, algorithm=algorithm, drafter=f"d{depth}", prefetch=depth), threading.Event())

    assert same(weights_of(run, "d0"), weights_of(run, "d2"))


@pytest.mark.parametrize("reads_ahead", [0, 5])
def test_one_that_is_stopped_and_resumed_does_too_whatever_its_target_reads_ahead(
    *, run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any], reads_ahead: int
) -> None:
    for number in range(3):
        samples.put(f"train-{number:06d}")
    run.seal({})
    assert fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=threading.Event())
    capture, stop = toy_target.capture, threading.Event()
    already = len(toy_target.seen)
    toy_target.on_batch = lambda count: stop.set() if count == already + 6 else None

    def greedy(batches: Iterator[list[Row]]) -> Iterator[Any]:
        def read() -> Iterator[list[Row]]:
            window: list[list[Row]] = []
            for batch in batches:
                window.append(batch)
                if len(window) > reads_ahead:
                    yield window.pop(0)
            yield from window

        yield from capture(read())

    toy_target.capture = greedy
    parted = knobs.model_copy(update={"drafter": "parted", "prefetch": 3})
    assert not fit(run, parted, toy_target, toy_algorithm(), Team.alone(), stop=stop)
    left = checkpoint.latest(run.drafter_dir("parted"))
    assert left is not None
    assert 0 < checkpoint.step_of(left) <= 6
    toy_target.on_batch = lambda _: None
    assert fit(run, parted, toy_target, toy_algorithm(), Team.alone(), stop=threading.Event())

    assert same(weights_of(run, "d"), weights_of(run, "parted"))


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_batches_are_captured_ahead_than_asked(depth: int, until: Callable[..., Any]) -> None:
    made: list[int] = []

    def capture() -> Iterator[Any]:
        for number in range(10):
            made.append(number)
            yield [number]

    with ahead(capture(), depth) as states:
        for taken in range(10):
            until(lambda taken=taken: len(made) == min(taken + depth, 10), what="as many as there is room for")
            assert next(states) == [taken]
        assert list(states) == []


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("error", [TargetError("the engine is gone"), torch.OutOfMemoryError("no room")])
def test_what_capture_raises_comes_in_its_place_as_what_it_is(depth: int, error: Exception) -> None:
    def capture() -> Iterator[Any]:
        yield from ([0], [1])
        raise error

    taken: list[Any] = []
    with pytest.raises(type(error), match=str(error)), ahead(capture(), depth) as states:
        taken.extend(states)

    assert taken == [[0], [1]]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_target_that_fails_in_the_middle_ends_the_training_with_its_error(
    *, run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any], depth: int
) -> None:
    samples.put("train-000000")
    run.seal({})

    def fail(count: int) -> None:
        if count == 4:
            raise TargetError("the engine is gone")

    toy_target.on_batch = fail
    knobs = knobs.model_copy(update={"prefetch": depth, "log_steps": 1})

    with pytest.raises(TargetError, match="the engine is gone"):
        fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=threading.Event())

    progress = Progress.read(run, "d")
    assert progress is not None
    assert progress.step == 3


def test_an_error_of_the_feed_ends_the_training_as_what_it_is(
    run: Run, knobs: Trainer, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    run.seal({})

    with pytest.raises(TrainingError, match="no row to train on"):
        fit(
            run, knobs.model_copy(update={"prefetch": 2}), toy_target, toy_algorithm(), Team.alone(),
            stop=threading.Event(),
        )  # fmt: skip


def test_a_training_that_is_done_does_not_wait_for_samples_that_it_had_looked_ahead_for(
    run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any]
) -> None:
    samples.put("train-000000")
    knobs = knobs.model_copy(update={"prefetch": 2, "max_steps": 2, "poll_s": 3600.0, "batch_tokens": 200})

    assert fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=threading.Event())

    assert "prefetch" not in {thread.name for thread in threading.enumerate()}


def test_a_training_that_waits_for_samples_says_so_once_it_stands_still_and_can_be_stopped(
    *, run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any], until: Any
) -> None:
    samples.put("train-000000")
    stop, results = threading.Event(), list[bool]()
    knobs = knobs.model_copy(update={"prefetch": 2, "max_steps": 10_000, "poll_s": 3600.0})
    training = threading.Thread(
        target=lambda: results.append(fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=stop))
    )

    training.start()
    try:
        until(lambda: (progress := Progress.read(run, "d")) is not None and progress.waiting, deadline_s=20)
        assert len(toy_target.seen) > 2
    finally:
        stop.set()
        training.join(20)

    assert results == [False]
    held = checkpoint.latest(run.drafter_dir("d"))
    assert held is not None
    assert checkpoint.step_of(held) == len(toy_target.seen)  # nothing that was captured is lost


@pytest.mark.parametrize("depth", [0, 2])
def test_autocast_of_the_loop_does_not_reach_the_target(
    *, run: Run, knobs: Trainer, samples: Any, toy_target: Any, toy_algorithm: Callable[..., Any], depth: int
) -> None:
    samples.put("train-000000")
    run.seal({})
    seen: set[bool] = set()
    toy_target.on_batch = lambda _: seen.add(torch.is_autocast_enabled("cpu"))
    knobs = knobs.model_copy(update={"prefetch": depth, "dtype": "bfloat16"})

    assert fit(run, knobs, toy_target, toy_algorithm(), Team.alone(), stop=threading.Event())

    assert seen == {False}


def test_time_is_counted_for_what_the_loop_stood_still_for() -> None:
    class Starved(NoFeed):
        def wait(self) -> None:
            self.is_waiting = True
            time.sleep(0.05)
            self.waited_s += 0.05
            self.is_waiting = False

    def slow() -> Iterator[Any]:
        time.sleep(0.05)
        yield [0]

    def late(feed: Starved) -> Iterator[Any]:
        feed.wait()
        yield [0]

    for depth in (0, 1):
        with ahead(slow(), depth) as states:
            next(states)
        assert states.waited_s > 0
        assert states.starved_s == 0
        feed = Starved()
        with ahead(late(feed), depth, feed) as states:
            next(states)
        assert states.starved_s > states.waited_s
    # What is there already is not waited for.
    with ahead(iter([[0], [1]]), 2) as states:
        while len(states._made) < 2:
            time.sleep(0.001)
        next(states)
    assert states.waited_s < 0.05


def test_a_loop_that_ends_in_order_parts_from_its_team_and_one_that_fails_does_not() -> None:
    for depth in (0, 2):
        feed = NoFeed()
        with ahead(iter([[0]]), depth, feed):
            pass
        assert feed.calls == ["close", "part"]
        feed = NoFeed()
        with pytest.raises(ZeroDivisionError), ahead(iter([[0]]), depth, feed):
            raise ZeroDivisionError
        assert feed.calls == ["close"]


def test_the_depth_is_two_except_where_the_target_computes_on_the_cpu_that_trains(knobs: Trainer) -> None:
    assert depth_of(knobs, CPU) == 0
    assert depth_of(knobs, torch.device("cuda", 0)) == 2
    assert depth_of(knobs.model_copy(update={"prefetch": 7}), CPU) == 7


def test_one_thread_may_capture_while_another_computes_logits() -> None:
    target: Any = targets.load(load(flags={"target.path": str(TINY), "trainer.dtype": "float32"}), [1, 3], CPU)
    rows = [Row(str(n), torch.arange(20) + n, torch.ones(20, dtype=torch.bool)) for n in range(6)]
    [alone] = target.capture([rows])
    found: list[Any] = []
    done = threading.Event()

    def capture() -> None:
        found.extend(target.capture([rows] * 20))
        done.set()

    threading.Thread(target=capture, daemon=True).start()
    while not done.is_set():
        target.logits(alone[0].last)
        target.forward(rows[0].ids[None])

    assert len(found) == 20
    assert all(torch.equal(one.last, other.last) for batch in found for one, other in zip(batch, alone, strict=True))
