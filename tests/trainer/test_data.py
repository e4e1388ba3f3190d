"""Which rows are trained on, in which order, and when the feed waits."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from draftfleet import control
from draftfleet.errors import TrainingError
from draftfleet.names import parts_of
from draftfleet.records import Sample, Turn
from draftfleet.runs import Run
from draftfleet.settings import Trainer
from trainer.data import START, Feed, Journal, Kept, Position, Step, plan, training_rows
from trainer.team import Team

VOCAB = 32


def feed(run: Run, knobs: Trainer, **changes: Any) -> Feed:
    return Feed(run, knobs, VOCAB, Team.alone(), **changes)


def keys(steps: list[Step]) -> list[list[str]]:
    return [[row.key for row in batch] for step in steps for batch in step.batches]


def flat(batches: list[list[str]]) -> list[str]:
    return [key for batch in batches for key in batch]


def take(feed: Feed, count: int, position: Position = START) -> list[Step]:
    return list(islice(feed.steps(position, 1), count))


def epoch_0(feed: Feed) -> list[list[str]]:
    """Batches up to the first of epoch 1."""
    seen: list[list[str]] = []
    for step in feed.steps(START, 1):
        if step.then.epoch == 1:
            return seen
        seen += keys([step])
    raise AssertionError("the feed ended")


def test_a_row_is_the_exact_ids_and_its_mask_is_true_on_the_completion_alone(samples: Any) -> None:
    sample = samples.make("train-000000", "a", prompt_token_ids=[5, 6], token_ids=[7, 8, 9], completion_tokens=3)

    row = training_rows(sample, max_tokens=100, vocab_size=VOCAB)["a"]

    assert isinstance(row, Kept)
    assert row.row().ids.tolist() == [5, 6, 7, 8, 9]
    assert row.row().mask.tolist() == [False, False, True, True, True]


def test_a_row_that_is_too_long_is_cut_at_its_end(samples: Any) -> None:
    sample = samples.make("train-000000", "a", prompt_token_ids=[5, 6], token_ids=[7] * 20)

    row = training_rows(sample, max_tokens=8, vocab_size=VOCAB)["a"]

    assert isinstance(row, Kept)
    assert row.row().ids.tolist() == [5, 6] + [7] * 6


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("failed", {"outcome": "failed"}),
        ("ids_differ_from_usage", {"completion_tokens": 999}),
        ("ids_differ_from_usage", {"ids_source": "none"}),
        ("heldout", {"split": "heldout"}),
        ("too_short", {"token_ids": [1, 2]}),
        ("too_short", {"prompt_token_ids": [1] * 46}),
        ("too_short", {"prompt_token_ids": []}),
        ("outside_vocabulary", {"token_ids": [1, 2, VOCAB]}),
        ("outside_vocabulary", {"token_ids": [1, 2, -1]}),
    ],
)
def test_a_row_that_is_not_fit_is_not_trained_on_and_its_reason_is_counted(
    run: Run, knobs: Trainer, samples: Any, reason: str, changes: dict[str, Any]
) -> None:
    samples.prompts("train-000000", 2)
    bad: Sample = samples.make("train-000000", "bad", **changes)
    run.commit("train-000000", [bad, samples.make("train-000000", "good")])
    run.seal({})

    data = feed(run, knobs)

    assert epoch_0(data) == [["good"]]
    assert data.not_trained == {reason: 1}


def test_a_truncated_row_is_trained_on(run: Run, knobs: Trainer, samples: Any) -> None:
    samples.prompts("train-000000", 1)
    run.commit("train-000000", [samples.make("train-000000", "cut", outcome="truncated", finish_reason="length")])

    assert keys(take(feed(run, knobs), 1)) == [["cut"]]


def a_conversation(samples: Any, key: str, **changes: Any) -> Sample:
    """Three turns, of which the last is the sample's own."""
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant", "user")]
    turns = [
        Turn(message=1, prompt_token_ids=[1], token_ids=[2, 3, 4], ids_source="engine", completion_tokens=3),
        Turn(message=3, prompt_token_ids=[1, 5], token_ids=[6, 7, 8], ids_source="engine", completion_tokens=3),
    ]
    return samples.make("train-000000", key, **({"messages": messages, "turns": turns} | changes))


def test_every_finished_turn_of_a_conversation_is_a_row_of_its_own_on_its_own_prompt(
    run: Run, knobs: Trainer, samples: Any
) -> None:
    samples.prompts("train-000000", 1)
    run.commit("train-000000", [a_conversation(samples, "c", prompt_token_ids=[1, 9], token_ids=[3, 4, 5, 6])])
    run.seal({})

    rows = {row.key: row for step in take(feed(run, knobs), 1) for batch in step.batches for row in batch}

    assert {key: (row.ids.tolist(), row.num_prompt_tokens) for key, row in rows.items()} == {
        "c": ([1, 2, 3, 4], 1),
        "c.1": ([1, 5, 6, 7, 8], 2),
        "c.2": ([1, 9, 3, 4, 5, 6], 2),
    }


def test_a_conversation_that_failed_gives_its_finished_turns_and_its_failed_turn_once_it_is_answered(
    run: Run, knobs: Trainer, samples: Any
) -> None:
    samples.prompts("train-000000", 1)
    samples.prompts("train-000001", 1)
    run.commit("train-000000", [a_conversation(samples, "c", outcome="failed", token_ids=[], ids_source="none")])
    data = feed(run, knobs)
    stream = data.steps(START, 1)
    assert sorted(flat(keys([next(stream)]))) == ["c", "c.1"]
    assert data.not_trained == {"failed": 1}

    run.commit("train-000001", [a_conversation(samples, "c")])
    run.seal({})

    assert keys([next(stream)]) == [["c.2"]]
    assert data.not_trained == {}


def test_ids_that_differ_from_usage_cost_their_turn_alone(run: Run, knobs: Trainer, samples: Any) -> None:
    sound = a_conversation(samples, "c")
    samples.prompts("train-000000", 1)
    run.commit("train-000000", [replace(sound, turns=[replace(sound.turns[0], completion_tokens=4), sound.turns[1]])])
    run.seal({})

    data = feed(run, knobs)

    assert sorted(flat(epoch_0(data))) == ["c.1", "c.2"]
    assert data.not_trained == {"ids_differ_from_usage": 1}


def test_held_out_shards_are_counted_and_never_admitted(run: Run, knobs: Trainer, samples: Any) -> None:
    trained = samples.put("train-000000", 3)
    samples.put("heldout-000000", 5)
    run.seal({})

    data = feed(run, knobs)

    assert sorted(flat(epoch_0(data))) == sorted(trained)
    assert data.not_trained == {"heldout": 5}
    assert data.journal.admissions == [["train-000000"]]


def test_epoch_0_gives_every_row_once_and_no_batch_is_larger_than_allowed(
    run: Run, knobs: Trainer, samples: Any
) -> None:
    expected = [key for number in range(4) for key in samples.put(f"train-{number:06d}", 20)]
    run.seal({})

    steps = list(islice(feed(run, knobs).steps(START, 1), 1000))
    first = [step for step in steps if step.then.epoch == 0]

    assert sorted(flat(keys(first))) == sorted(expected)
    for batch in (batch for step in first for batch in step.batches):
        assert len(batch) * max(len(row.ids) for row in batch) <= knobs.batch_tokens


def test_batches_hold_rows_of_like_length() -> None:
    rows = [Kept(str(n), torch.zeros(1 + n % 64, dtype=torch.int32), 0) for n in range(512)]

    batches = plan(rows, 512, "seed")

    padded = sum(len(batch) * max(len(row.ids) for row in batch) for batch in batches)
    assert padded < 1.1 * sum(len(row.ids) for row in rows)


@pytest.mark.parametrize(("mean", "batch_tokens"), [(200, 8192), (800, 8192), (2500, 32768)])
def test_less_than_three_percent_of_what_is_computed_is_padding(mean: int, batch_tokens: int) -> None:
    dice, sigma = random.Random(mean), 0.8
    lengths = [int(dice.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)) for _ in range(10_000)]
    rows = [Kept(str(n), torch.empty(max(6, min(4096, length))), 0) for n, length in enumerate(lengths)]

    batches = plan(rows, batch_tokens, "seed")

    real = sum(len(row.ids) for row in rows)
    assert sum(len(batch) * max(len(row.ids) for row in batch) for batch in batches) < real / 0.97


def test_later_epochs_give_every_row_again_in_another_order(run: Run, knobs: Trainer, samples: Any) -> None:
    expected = [key for number in range(3) for key in samples.put(f"train-{number:06d}", 20)]
    run.seal({})

    steps = take(feed(run, knobs), 200)
    epochs = [flat(keys([step for step in steps if step.then.epoch == epoch])) for epoch in (1, 2)]

    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(expected)
    assert epochs[0] != epochs[1]


def test_a_feed_resumed_from_journal_and_position_goes_on_with_the_same_batches(
    run: Run, knobs: Trainer, samples: Any
) -> None:
    samples.put("train-000000", 20)
    first = feed(run, knobs)
    stream = first.steps(START, 2)
    seen = list(islice(stream, 3))
    samples.put("train-000001", 20)
    samples.put("train-000002", 20)
    run.seal({})
    seen += list(islice(stream, 40))

    for stop in range(0, 43, 7):
        journal = Journal.from_json(first.journal.to_json())
        resumed = list(islice(feed(run, knobs, journal=journal).steps(seen[stop].then, 2), 43 - stop - 1))

        assert keys(resumed) == keys(seen[stop + 1 :])
    assert first.journal.admissions == [["train-000000"], ["train-000001", "train-000002"]]


def test_another_seed_is_another_order(run: Run, knobs: Trainer, samples: Any) -> None:
    samples.put("train-000000", 40)

    orders = [keys(take(feed(run, knobs.model_copy(update={"seed": seed})), 8)) for seed in (0, 0, 1)]

    assert orders[0] == orders[1] != orders[2]


def test_the_feed_waits_for_shards_and_goes_on_when_they_land(run: Run, knobs: Trainer, samples: Any) -> None:
    samples.prompts("train-000000", 12)
    waited = threading.Event()
    data = feed(run, knobs, on_wait=lambda _: waited.set())
    seen: list[list[str]] = []
    reader = threading.Thread(target=lambda: seen.extend(epoch_0(data)))

    reader.start()
    assert waited.wait(10)
    assert seen == []
    run.commit("train-000000", [samples.make("train-000000", f"row{n}") for n in range(12)])
    run.seal({})
    reader.join(10)

    assert len(flat(seen)) == 12
    assert data.waited_s > 0


def test_a_run_is_not_complete_before_it_is_sealed_and_every_training_batch_is_done_or_dead(
    run: Run, knobs: Trainer, samples: Any
) -> None:
    samples.put("train-000000", 3)
    samples.prompts("train-000001", 1)
    samples.prompts("heldout-000000", 1)
    waits: list[int] = []
    stop = threading.Event()

    def on_wait(data: Feed) -> None:
        waits.append(len(waits))
        if len(waits) == 2:
            run.seal({})
        if len(waits) == 4:
            run.bury("train-000001", samples.make("train-000001", "dead", outcome="failed"))
        if len(waits) > 4:
            stop.set()

    seen = epoch_0(feed(run, knobs, on_wait=on_wait, stop=stop))

    assert len(flat(seen)) == 3
    assert len(waits) == 4


def test_a_run_that_was_cancelled_is_complete_with_what_there_is_and_a_paused_one_is_waited_for(
    run: Run, knobs: Trainer, samples: Any
) -> None:
    samples.put("train-000000", 3)
    samples.prompts("train-000001", 1)
    waits: list[int] = []
    stop = threading.Event()

    def on_wait(data: Feed) -> None:
        waits.append(len(waits))
        control.change(run, None, state="paused" if len(waits) < 3 else "cancelled")
        if len(waits) > 3:
            stop.set()

    seen = epoch_0(feed(run, knobs, on_wait=on_wait, stop=stop))

    assert len(flat(seen)) == 3
    assert len(waits) == 3


def test_asking_to_stop_ends_a_wait(run: Run, knobs: Trainer) -> None:
    stop = threading.Event()
    data = feed(run, knobs, stop=stop, on_wait=lambda _: stop.set())

    assert list(data.steps(START, 1)) == []


def test_a_corrupt_shard_is_skipped_said_once_and_its_neighbours_go_on(
    run: Run, knobs: Trainer, samples: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = samples.put("train-000000", 4)
    samples.prompts("train-000001", 4)
    samples.corrupt("train-000001")
    expected += samples.put("train-000002", 4)
    run.seal({})

    data = feed(run, knobs)
    seen = epoch_0(data)

    assert sorted(flat(seen)) == sorted(expected)
    assert data.corrupt == {"train-000001"}
    assert sum("shard skipped" in record.message for record in caplog.records) == 1
    assert "train-000001" in caplog.text


def test_a_corrupt_shard_that_was_done_again_is_admitted(run: Run, knobs: Trainer, samples: Any) -> None:
    samples.prompts("train-000000", 4)
    samples.corrupt("train-000000")

    def repair(data: Feed) -> None:
        if run.is_done("train-000000"):
            run.set_aside("train-000000")
        else:
            run.commit("train-000000", [samples.make("train-000000", "again")])

    data = feed(run, knobs, on_wait=repair)

    assert keys(take(data, 1)) == [["again"]]
    assert data.corrupt == set()


def test_a_shard_that_was_trained_on_and_is_damaged_since_is_not_left_out_of_a_resumed_training(
    run: Run, knobs: Trainer, samples: Any
) -> None:
    samples.put("train-000000", 4)
    samples.put("train-000001", 4)
    first = feed(run, knobs)
    take(first, 1)

    samples.corrupt("train-000001")

    with pytest.raises(TrainingError, match=r"shard train-000001 of run toy belongs to this training.*--repair"):
        feed(run, knobs, journal=first.journal)


def test_a_row_with_a_shard_of_its_batch_and_one_of_its_own_is_trained_on_once(
    run: Run, knobs: Trainer, samples: Any
) -> None:
    row_keys = samples.prompts("train-000000", 2)
    run.split("train-000000", 2)
    failed, fine = (
        samples.make("train-000000", row_keys[0], outcome="failed"),
        samples.make("train-000000", row_keys[1]),
    )
    run.commit("train-000000", [failed, fine])
    data = feed(run, knobs)
    stream = data.steps(START, 1)
    assert keys([next(stream)]) == [[row_keys[1]]]
    assert data.not_trained == {"failed": 1}

    for part, key in zip(parts_of("train-000000", 2), row_keys, strict=True):
        run.commit(part, [samples.make(part, key)])
    run.seal({})

    assert keys([next(stream)]) == [[row_keys[0]]]
    assert data.not_trained == {}
    assert sorted(flat(epoch_0(feed(run, knobs)))) == sorted(row_keys)


def test_a_complete_run_without_a_fit_row_is_an_error_that_says_why(run: Run, knobs: Trainer, samples: Any) -> None:
    samples.prompts("train-000000", 1)
    run.commit("train-000000", [samples.make("train-000000", "a", completion_tokens=4711)])
    run.seal({})

    with pytest.raises(TrainingError, match="1 ids_differ_from_usage"):
        take(feed(run, knobs), 1)
