"""Ids come from files beside the shards, and whatever is wrong with those, the shards are the truth."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from draftfleet.records import Prompt
from draftfleet.runs import Run
from producer.ids import FILE_BATCHES, Held, IdFiles, read_held

Prompts = Callable[..., list[Prompt]]
Filed = Callable[[int], list[Held]]


@pytest.fixture
def filed(run: Run, make_prompts: Prompts) -> Filed:
    """Batches of two prompts each, in shards and in files of ids."""

    def make(num_batches: int) -> list[Held]:
        files, held = IdFiles(run), list[Held]()
        for number in range(num_batches):
            batch, prompts = f"train-{number:06d}", make_prompts(2, start=2 * number)
            run.write_prompts(batch, prompts)
            held.append(Held.of(batch, prompts))
            files.add(held[-1])
        files.flush()
        return held

    return make


def read(run: Run) -> tuple[list[Held], list[str]]:
    """What the run holds, in order, and the batches whose shards had to be read for it."""
    found = sorted(read_held(run, run.batches()), key=lambda one: one[0].batch)
    return [held for held, _ in found], [held.batch for held, is_filed in found if not is_filed]


def test_what_was_filed_is_read_back_without_a_shard_being_read(
    run: Run, filed: Filed, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = filed(FILE_BATCHES + 3)

    monkeypatch.delattr(Run, "read_prompts")

    assert read(run) == (held, [])
    assert len(list(run.storage.list(run.ids_folder))) == 2


def test_a_shard_that_no_file_names_is_read(run: Run, filed: Filed, make_prompts: Prompts) -> None:
    held = filed(3)
    prompts = make_prompts(1, split="heldout", start=100)
    run.write_prompts("heldout-000000", prompts)

    assert read(run) == ([Held.of("heldout-000000", prompts), *held], ["heldout-000000"])


def test_a_batch_that_two_files_name_counts_once_and_one_without_a_shard_not_at_all(run: Run, filed: Filed) -> None:
    held = filed(3)
    again = IdFiles(run)
    again.add(held[1])
    again.add(Held("train-000009", [1], [1]))
    again.flush()

    assert read(run) == (held, [])


def test_a_file_that_is_damaged_costs_only_the_reading_of_the_shards(
    run: Run, filed: Filed, caplog: pytest.LogCaptureFixture
) -> None:
    held = filed(3)
    (name,) = run.storage.list(run.ids_folder)
    raw = run.storage.read(f"{run.ids_folder}/{name}")
    middle = raw.index(int.to_bytes(held[1].ids[0], 16, "big")[:8])

    for damaged in (raw[: len(raw) // 2], b"", raw[:middle] + b"\0" * 8 + raw[middle + 8 :]):
        run.storage.put(f"{run.ids_folder}/{name}", damaged)
        with caplog.at_level(logging.WARNING):
            assert read(run) == (held, [one.batch for one in held])
        assert "file of ids not read" in caplog.text
        caplog.clear()


def test_a_file_of_a_run_that_had_this_name_before_is_not_believed(run: Run, filed: Filed) -> None:
    held = filed(2)
    run.storage.delete("run/run.json")
    other = Run.create(run.storage, "run", run.info.content, {})

    assert read(other) == (held, [one.batch for one in held])


def test_the_hash_of_a_text_is_the_same_in_every_process(make_prompts: Prompts) -> None:
    assert Held.of("train-000000", make_prompts(1)).texts == [4594773267571962213]  # blake2b of "question 0", 8 bytes


def test_a_prompt_that_is_sampled_several_times_is_held_once(run: Run, make_prompts: Prompts) -> None:
    prompts = make_prompts(2)
    asked = [replace(prompt, sample=number) for prompt in prompts for number in range(4)]
    run.write_prompts("train-000000", asked)

    [(held, _)] = read_held(run, run.batches())

    assert held == Held.of("train-000000", prompts)
