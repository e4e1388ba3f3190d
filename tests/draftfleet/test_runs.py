"""The folder of a run: what is pinned, what is immutable, what a damaged file costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from datasets import load_dataset

from draftfleet.columns import SAMPLE_SCHEMA
from draftfleet.errors import CorruptFile, RunConflict, RunMissing
from draftfleet.names import batch_id, parent_of, parts_of
from draftfleet.outcomes import best
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.storage import FileStorage

Prompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]
BATCH = batch_id("train", 0)


def test_a_run_opened_again_is_the_same_run(storage: FileStorage, run: Run) -> None:
    again = Run.create(storage, "run", run.info.content, {"command": "another"})

    assert again.run_id == run.run_id
    assert Run.open(storage, "run").info == run.info


def test_a_run_with_other_settings_is_refused_with_each_difference(storage: FileStorage, run: Run) -> None:
    with pytest.raises(RunConflict) as refusal:
        Run.create(storage, "run", {"target.model": "other", "sampling.max_tokens": 65}, {})

    assert "target.model: the run has 'tiny', now 'other'" in str(refusal.value)
    assert "sampling.max_tokens: the run has 64, now 65" in str(refusal.value)


def test_a_run_that_is_not_there_says_where_it_was_looked_for(storage: FileStorage) -> None:
    with pytest.raises(RunMissing, match=storage.url):
        Run.open(storage, "nowhere")


def test_prompts_come_back_as_they_were_and_the_shard_never_changes(run: Run, make_prompts: Prompts) -> None:
    prompts = make_prompts(3)

    assert run.write_prompts(BATCH, prompts) is True
    assert run.write_prompts(BATCH, make_prompts(1, start=9)) is False

    assert run.read_prompts(BATCH) == prompts
    assert run.read_prompts(parts_of(BATCH, 3)[1]) == [prompts[1]]


def test_samples_come_back_as_they_were(run: Run, make_prompts: Prompts, make_sample: MakeSample) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": [1, "two", None]}}}]
    call = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "[1]", "tool_call_id": "1", "odd": {"kept": True}},
    ]
    prompt = Prompt("a" * 32, "train", messages, tools)
    samples = [
        make_sample(prompt, tools=tools, tool_calls=call, reasoning="I add."),
        make_sample(make_prompts(1)[0], outcome="failed", error="refused", error_status=400, token_ids=[]),
    ]

    run.commit(BATCH, samples)

    assert run.read_samples(BATCH) == samples


def test_a_shard_is_read_by_datasets_with_the_documented_columns(
    run: Run, make_prompts: Prompts, make_sample: MakeSample, storage: FileStorage
) -> None:
    run.commit(BATCH, [make_sample(prompt) for prompt in make_prompts(4)])

    rows = load_dataset("parquet", data_files=f"{storage.root}/run/samples/train-*.parquet", split="train")

    assert rows.column_names == SAMPLE_SCHEMA.names
    assert rows[0]["messages"][0]["content"] == "Question 0?"
    assert rows[0]["token_ids"] == [8, 9, 2]


def test_the_first_commit_wins(run: Run, make_prompts: Prompts, make_sample: MakeSample) -> None:
    [prompt] = make_prompts(1)

    assert run.commit(BATCH, [make_sample(prompt, content="first")]) is True
    assert run.commit(BATCH, [make_sample(prompt, content="second")]) is False

    assert run.read_samples(BATCH)[0].content == "first"


def test_the_footer_counts_outcomes_tokens_and_mismatches(
    run: Run, make_prompts: Prompts, make_sample: MakeSample
) -> None:
    one, two, three, four = make_prompts(4)
    samples = [
        make_sample(one),
        make_sample(two, outcome="truncated", completion_tokens=3),
        make_sample(three, completion_tokens=4),
        make_sample(four, outcome="failed", token_ids=[], completion_tokens=-1),
    ]

    run.commit(BATCH, samples)

    counts = run.counts(BATCH)
    assert (counts.ok, counts.truncated, counts.failed) == (2, 1, 1)
    assert counts.tokens == 3 + 3 + 4
    assert counts.mismatched == 1


@pytest.mark.parametrize("damage", [b"", b"PAR1 and no more", None])
def test_a_damaged_shard_is_named_with_the_repair_and_can_be_set_aside(
    run: Run, make_prompts: Prompts, make_sample: MakeSample, storage: FileStorage, damage: bytes | None
) -> None:
    run.commit(BATCH, [make_sample(prompt) for prompt in make_prompts(50)])
    path = storage.root / f"run/samples/{BATCH}.parquet"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if damage is None else damage)

    with pytest.raises(CorruptFile, match="verify run --repair"):
        run.read_samples(BATCH)
    run.set_aside(BATCH)

    assert not run.is_done(BATCH)
    assert len(list((storage.root / "run/corrupt").iterdir())) == 1


def test_a_file_that_cannot_be_read_is_named_whatever_is_wrong_with_it(
    storage: FileStorage, run: Run, make_prompts: Prompts
) -> None:
    run.write_prompts(BATCH, make_prompts(50))
    shard = bytearray(storage.read(f"run/prompts/{BATCH}.jsonl.gz"))
    shard[len(shard) // 2 :] = bytes(len(shard) - len(shard) // 2)
    damaged: dict[str, tuple[bytes, Callable[[], object]]] = {
        f"run/prompts/{BATCH}.jsonl.gz": (bytes(shard), lambda: run.read_prompts(BATCH)),
        f"run/split/{BATCH}.json": (b'{"rows"', run.split_sizes),
        f"run/dead/{BATCH}.json": (b"[]", run.dead),
        "run/sealed.json": (b"\xff", run.sealed),
    }
    for path, (raw, read) in damaged.items():
        storage.put(path, raw)

        with pytest.raises(CorruptFile, match=path):
            read()


def test_a_row_that_its_batch_has_not_is_missing(run: Run, make_prompts: Prompts) -> None:
    run.write_prompts(BATCH, make_prompts(2))

    with pytest.raises(FileNotFoundError, match="which has 2"):
        run.read_prompts(f"{BATCH}.0002")


def test_a_torn_partial_loses_only_its_torn_row(
    run: Run, make_prompts: Prompts, make_sample: MakeSample, storage: FileStorage
) -> None:
    samples = [make_sample(prompt) for prompt in make_prompts(3)]
    name = run.write_partial("host-1", 1, samples)
    path = storage.root / "run/partial" / name
    path.write_bytes(path.read_bytes()[:-40])

    assert run.read_partial(name) == samples[:2]
    assert run.read_partial("gone.jsonl") == []


def test_outstanding_batches_are_those_without_shard_or_grave(
    run: Run, make_prompts: Prompts, make_sample: MakeSample
) -> None:
    done, split, waiting = (batch_id("train", number) for number in range(3))
    for number, batch in enumerate((done, split, waiting)):
        run.write_prompts(batch, make_prompts(2, start=2 * number))
    run.commit(done, [make_sample(prompt) for prompt in run.read_prompts(done)])
    run.split(split, 2)
    first, second = parts_of(split, 2)
    run.bury(first, make_sample(run.read_prompts(first)[0], first, outcome="failed"))

    assert run.outstanding() == [second, waiting]


def test_a_late_shard_of_a_split_batch_settles_its_rows(
    run: Run, make_prompts: Prompts, make_sample: MakeSample
) -> None:
    run.write_prompts(BATCH, make_prompts(2))
    run.split(BATCH, 2)
    run.commit(BATCH, [make_sample(prompt) for prompt in run.read_prompts(BATCH)])
    run.seal({"prompts": 2})

    assert run.outstanding() == []


def test_of_several_samples_of_a_row_the_best_outcome_stays(make_prompts: Prompts, make_sample: MakeSample) -> None:
    one, two = make_prompts(2)
    failed, ok, again = make_sample(one, outcome="failed"), make_sample(one), make_sample(one, content="late")

    chosen = best([failed, ok, again, make_sample(two, outcome="truncated"), make_sample(two, outcome="failed")])

    assert chosen[one.row_key] is ok
    assert chosen[two.row_key].outcome == "truncated"


def test_ids_of_split_batches_name_their_row() -> None:
    assert parent_of(parts_of("train-000007", 12)[3]) == ("train-000007", 3)
    assert parent_of("train-000007") == ("train-000007", None)
    assert parts_of("train-000007", None) == ["train-000007"]
