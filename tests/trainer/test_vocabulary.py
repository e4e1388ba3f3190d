"""A drafter's own vocabulary: what is counted, when, where it stands, and what a training does with it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draftfleet.errors import TrainingError
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from trainer import checkpoint, vocabulary
from trainer.progress import Progress
from trainer.team import Team
from trainer.train import train
from trainer.vocabulary import Vocabulary, settle

NEVER = threading.Event()
TINY = Path(__file__).parents[2] / "examples" / "tiny-target"


def settings(run: Run, **flags: Any) -> Settings:
    given: dict[str, Any] = {
        "run": run.name,
        "storage.url": run.storage.url,
        "target.path": str(TINY),
        "trainer.drafter": "d",
        "trainer.max_steps": 4,
        "trainer.batch_tokens": 64,
        "trainer.poll_s": 0.01,
        "trainer.device": "cpu",
        "eagle3.draft_vocab_size": 4,
        "eagle3.vocab_rows": 2,
    }
    return load(flags=given | flags)


def counted(run: Run, **flags: Any) -> Vocabulary:
    found = settle(run, settings(run, **flags), 32, Team.alone(), NEVER)
    assert found is not None
    return found


def put(samples: Any, batch: str, rows: dict[str, list[int]], **changes: Any) -> None:
    samples.run.write_prompts(batch, [])
    samples.run.commit(batch, [samples.make(batch, key, token_ids=ids, **changes) for key, ids in rows.items()])


def test_the_most_frequent_tokens_of_completions_are_kept_in_ascending_order(run: Run, samples: Any) -> None:
    put(samples, "train-000000", {"a": [20, 20, 9, 20], "b": [9, 7, 9, 7, 31]})  # prompts are [1, 2]
    run.seal({})

    found = counted(run, **{"eagle3.draft_vocab_size": 2})

    assert found.ids == [9, 20]
    assert (found.rows, found.tokens, found.covered) == (2, 9, 6)


def test_of_equally_frequent_tokens_and_of_those_that_never_occur_the_lowest_are_kept(run: Run, samples: Any) -> None:
    put(samples, "train-000000", {"a": [9, 9, 30, 31], "b": [9, 9, 30, 31]})
    run.seal({})

    assert counted(run, **{"eagle3.draft_vocab_size": 2}).ids == [9, 30]
    assert counted(run, **{"eagle3.draft_vocab_size": 6}).ids == [0, 1, 2, 9, 30, 31]


def test_only_rows_that_are_trained_on_are_counted_once_and_as_far_as_they_are_trained_on(
    run: Run, samples: Any
) -> None:
    put(samples, "train-000000", {"a": [5, 5, 5, 5, 6, 6, 6, 6, 6, 6]})
    put(samples, "train-000001", {"a": [7] * 10, "b": [8, 8, 8]})
    put(samples, "train-000002", {"c": [9] * 20}, completion_tokens=21)
    put(samples, "train-000003", {"d": [10, 10]})
    put(samples, "heldout-000000", {"e": [11] * 20})
    run.seal({})

    found = counted(run, **{"trainer.max_length": 6, "eagle3.draft_vocab_size": 2, "eagle3.vocab_rows": 100})

    assert found.ids == [5, 8]
    assert (found.rows, found.tokens, found.covered) == (2, 7, 7)


def test_counting_ends_with_the_shard_that_has_the_last_row_it_needs(run: Run, samples: Any) -> None:
    put(samples, "train-000001", {"c": [7] * 9, "d": [7] * 9})
    put(samples, "train-000000", {"a": [5, 5, 5], "b": [6, 6, 6]})

    found = counted(run)

    assert found.ids == [0, 1, 5, 6]
    assert found.rows == 2


def test_it_waits_for_rows_enough_and_takes_what_there_is_once_the_run_is_complete(run: Run, samples: Any) -> None:
    put(samples, "train-000000", {"a": [5, 5, 5]})
    waits: list[int] = []

    def on_wait(rows: int) -> None:
        waits.append(rows)
        if len(waits) == 2:
            run.seal({})

    found = settle(run, settings(run), 32, Team.alone(), NEVER, on_wait=on_wait)

    assert waits == [1, 1]
    assert found == Vocabulary([0, 1, 2, 5], rows=1, tokens=3, covered=3)


def test_a_stop_ends_the_wait_without_a_vocabulary(run: Run) -> None:
    stop = threading.Event()

    found = settle(run, settings(run), 32, Team.alone(), stop, on_wait=lambda _: stop.set())

    assert found is None
    assert vocabulary.coverage(run, "d") is None


def test_a_complete_run_without_a_row_is_refused(run: Run) -> None:
    run.seal({})

    with pytest.raises(TrainingError, match="no row to count a draft vocabulary on"):
        counted(run)


def test_what_was_counted_stands_although_more_rows_came(run: Run, samples: Any) -> None:
    put(samples, "train-000000", {"a": [5, 5, 5], "b": [6, 6, 6]})
    first = counted(run)
    put(samples, "train-000001", {"c": [7] * 50, "d": [8] * 50})

    assert counted(run) == first
    held = json.loads(run.storage.read(f"{run.name}/drafters/d/vocabulary.json"))
    assert held["ids"] == first.ids == [0, 1, 5, 6]
    assert (held["rows"], held["coverage"]) == (2, 1.0)
    assert held["of"]["run_id"] == run.run_id


@pytest.mark.parametrize("changed", ["run_id", "tokenizer", "vocab_size", "draft_vocab_size", "vocab_rows"])
def test_one_that_was_counted_for_something_else_is_counted_anew(run: Run, samples: Any, changed: str) -> None:
    put(samples, "train-000000", {"a": [5, 5, 5], "b": [6, 6, 6]})
    counted(run)
    path = f"{run.name}/drafters/d/vocabulary.json"
    held = json.loads(run.storage.read(path))
    run.storage.put(
        path, json.dumps(held | {"of": held["of"] | {changed: "another"}, "ids": [28, 29, 30, 31]}).encode()
    )

    assert counted(run).ids == [0, 1, 5, 6]


def test_given_ids_are_counted_without_a_wait_and_stand(run: Run, samples: Any) -> None:
    put(samples, "train-000000", {"a": [5, 6, 7]})

    found = settle(run, settings(run), 32, Team.alone(), NEVER, given=[3, 4, 5, 6])

    assert found == Vocabulary([3, 4, 5, 6], rows=1, tokens=3, covered=2)
    assert vocabulary.coverage(run, "d") == pytest.approx(2 / 3)


def test_a_training_drafts_what_was_counted_says_its_coverage_and_resumes_with_the_same(run: Run, samples: Any) -> None:
    put(samples, "train-000000", {f"r{n}": [5, 6, 7, 8, 9, 5, 6, 7, 8, n + 10] for n in range(10)})
    run.seal({})
    knobs = {"eagle3.draft_vocab_size": 8, "eagle3.vocab_rows": 10, "eagle3.loss": "lk"}

    assert train(settings(run, **knobs), NEVER)

    newest = checkpoint.latest(run.drafter_dir("d"))
    assert newest is not None
    tensors = checkpoint.read(newest).tensors
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    assert (tensors["d2t"] + torch.arange(8)).tolist() == tensors["t2d"].nonzero()[:, 0].tolist() == ids
    progress = Progress.read(run, "d")
    assert progress is not None
    assert progress.vocabulary_coverage == pytest.approx(93 / 100)

    run.storage.put(f"{run.name}/drafters/d/vocabulary.json", b'{"of": "lost", "coverage": 0.5}')
    (run.drafter_dir("d") / "drafter-settings.json").unlink()
    assert train(settings(run, **knobs, **{"trainer.max_steps": 6}), NEVER)

    newest = checkpoint.latest(run.drafter_dir("d"))
    assert newest is not None
    assert checkpoint.step_of(newest) == 6
    assert torch.equal(checkpoint.read(newest).tensors["d2t"], tensors["d2t"])


def test_a_training_that_waits_for_its_vocabulary_says_so_and_can_be_stopped(run: Run, samples: Any) -> None:
    put(samples, "train-000000", {"a": [5, 5, 5]})
    stop = threading.Event()
    results: list[bool] = []
    training = threading.Thread(target=lambda: results.append(train(settings(run), stop)))

    training.start()
    for _ in range(3000):
        progress = Progress.read(run, "d")
        if progress is not None and progress.waiting:
            break
        training.join(0.01)
    stop.set()
    training.join(20)

    assert progress is not None
    assert (progress.waiting, progress.rows_admitted, progress.step) == (True, 1, 0)
    assert results == [False]
    assert checkpoint.latest(run.drafter_dir("d")) is None
