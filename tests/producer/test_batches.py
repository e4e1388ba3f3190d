"""Batches of one split, a shard before its reference, and never two producers on one number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from draftfleet.errors import RunBusy
from draftfleet.names import batch_id
from draftfleet.records import Prompt
from draftfleet.runs import Run
from producer.batches import WAITING_BATCHES, Batch, Batches, Writer, next_numbers

Prompts = Callable[..., list[Prompt]]


def always() -> None: ...


def ignore(_: Batch) -> None: ...


def write_all(writer: Writer, prompts: Iterable[Prompt]) -> None:
    """Each prompt as a batch of its own."""
    with writer:
        for number, prompt in enumerate(prompts):
            writer.put((batch_id("train", number), [prompt]))


def test_a_batch_holds_prompts_of_one_split_and_the_last_ones_may_be_short(make_prompts: Prompts) -> None:
    handed: list[Batch] = []
    train, heldout = make_prompts(5), make_prompts(1, split="heldout")
    batches = Batches(2, next_numbers([]), handed.append)

    for prompt in [*train[:3], *heldout, *train[3:]]:
        batches.add(prompt)
    batches.close()

    assert handed == [
        ("train-000000", train[:2]),
        ("train-000001", train[2:4]),
        ("train-000002", train[4:]),
        ("heldout-000000", heldout),
    ]


def test_numbers_go_on_after_those_of_the_run() -> None:
    assert next_numbers(["train-000000", "train-000011", "heldout-000003"]) == {"train": 12, "heldout": 4}


def test_each_shard_is_there_when_its_reference_is_published(run: Run, make_prompts: Prompts) -> None:
    published: list[str] = []
    missing: list[str] = []

    def publish(batches: list[str]) -> None:
        missing.extend(batch for batch in batches if batch not in run.batches())
        published.extend(batches)

    writer = Writer(run, publish, always, ignore)
    write_all(writer, make_prompts(2 * WAITING_BATCHES))

    assert published == run.batches()
    assert not missing
    assert writer.num_written == len(published) == 2 * WAITING_BATCHES


def test_a_batch_is_published_while_no_further_one_comes(run: Run, make_prompts: Prompts) -> None:
    published = threading.Event()

    with Writer(run, lambda _: published.set(), always, ignore) as writer:
        writer.put((batch_id("train", 0), make_prompts(1)))

        assert published.wait(30)


def test_a_number_that_another_producer_has_put_stops_this_one(run: Run, make_prompts: Prompts) -> None:
    published: list[str] = []
    run.write_prompts(batch_id("train", 1), make_prompts(1))

    with pytest.raises(RunBusy, match="train-000001 was put by another producer"):
        write_all(Writer(run, published.extend, always, ignore), make_prompts(3, start=10))

    assert run.batches() == ["train-000000", "train-000001"]
    assert run.read_prompts("train-000001") == make_prompts(1)


def test_an_error_of_the_writing_thread_reaches_the_reader_however_much_waits(run: Run, make_prompts: Prompts) -> None:
    def refuse(_: list[str]) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        write_all(Writer(run, refuse, always, ignore), make_prompts(10 * WAITING_BATCHES))


def test_nothing_is_written_once_the_right_is_lost(run: Run, make_prompts: Prompts) -> None:
    def lost() -> None:
        raise RunBusy("another has it")

    run.seal({"prompts": 0})
    with pytest.raises(RunBusy, match="another has it"):
        write_all(Writer(run, lambda _: None, lost, ignore), make_prompts(1))

    assert run.batches() == []
    assert run.sealed() == {"prompts": 0}


def test_full_batches_are_kept_when_the_reading_fails(run: Run, make_prompts: Prompts) -> None:
    published: list[str] = []

    def broken() -> Iterator[Prompt]:
        yield from make_prompts(1)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        write_all(Writer(run, published.extend, always, ignore), broken())

    assert published == run.batches() == ["train-000000"]


def test_the_samples_of_a_prompt_stay_together_though_a_batch_gets_longer_by_them(make_prompts: Prompts) -> None:
    handed: list[Batch] = []
    prompts = make_prompts(3)
    batches = Batches(4, next_numbers([]), handed.append, samples=3)

    for prompt in prompts:
        batches.add(prompt)
    batches.close()

    keys = [[(prompt.prompt_id, prompt.sample) for prompt in batch] for _, batch in handed]
    samples = [[(prompt.prompt_id, number) for number in range(3)] for prompt in prompts]
    assert keys == [samples[0] + samples[1], samples[2]]
    assert len({prompt.row_key for _, batch in handed for prompt in batch}) == 9
