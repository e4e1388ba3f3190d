"""What a newer draftfleet wrote is refused with both versions, and left as it lies."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from draftfleet import repair
from draftfleet.errors import NewerFile, NewerMessage, QueueError, RunNewer
from draftfleet.outcomes import Counts
from draftfleet.queue import generate_queue, queues, retry_queue
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.shards import columns_in, counts_in, outcomes_in, pack_samples, samples_in
from draftfleet.storage import FileStorage
from draftfleet.verify import verify
from draftfleet.wire import BatchMessage

MakePrompts = Callable[..., list[Prompt]]
MESSAGE = {"v": 1, "run_id": "a" * 32, "run": "run", "batch": "train-000000"}


def sample(run: Run, prompt: Prompt) -> Sample:
    return Sample(
        run_id=run.run_id,
        run=run.name,
        batch="train-000000",
        row_key=prompt.row_key,
        prompt_id=prompt.prompt_id,
        split=prompt.split,
        messages=prompt.messages,
        outcome="ok",
        content="yes",
    )


def newer_shard(run: Run, prompts: list[Prompt]) -> bytes:
    samples = [replace(sample(run, prompt), schema_version=2) for prompt in prompts]
    return pack_samples(samples, Counts.of(samples), run.run_id)


def test_a_newer_message_is_known_by_its_version_whatever_else_it_holds() -> None:
    with pytest.raises(NewerMessage, match=r"of version 2 .* up to version 1: upgrade it") as caught:
        BatchMessage.parse({**MESSAGE, "v": 2, "colour": "blue"})

    assert caught.value.version == 2


@pytest.mark.parametrize("version", [0, -1, 1000, "2", None])
def test_a_version_that_none_will_have_makes_no_message(version: object) -> None:
    with pytest.raises(QueueError) as caught:
        BatchMessage.parse({**MESSAGE, "v": version})

    assert not isinstance(caught.value, NewerMessage)


def test_older_workers_do_not_listen_where_newer_messages_wait() -> None:
    assert queues("tiny") == ["generate-again.tiny", "generate.tiny"]
    assert {generate_queue("tiny", 2), retry_queue("tiny", 2)}.isdisjoint(queues("tiny"))


def test_a_newer_run_is_refused_with_both_versions(run: Run, storage: FileStorage) -> None:
    path = storage.root / run.name / "run.json"
    written = json.dumps(json.loads(path.read_text()) | {"schema_version": 2, "product_version": "9.9", "new": 1})
    path.write_text(written)

    with pytest.raises(RunNewer, match=r"schema version 2, made by draftfleet 9\.9; .* up to version 1"):
        Run.open(storage, run.name)

    assert path.read_text() == written


def row_keys_in(raw: bytes) -> object:
    return columns_in(raw, ["row_key"])


@pytest.mark.parametrize("read", [samples_in, counts_in, outcomes_in, row_keys_in])
def test_no_reader_takes_anything_from_a_newer_shard(
    run: Run, make_prompts: MakePrompts, read: Callable[[bytes], object]
) -> None:
    raw = newer_shard(run, make_prompts(2))
    assert pq.read_table(io.BytesIO(raw)).num_rows == 2

    with pytest.raises(NewerFile, match="of schema version 2, and this draftfleet reads up to version 1"):
        read(raw)


def test_a_newer_shard_is_reported_and_not_moved_aside(
    run: Run, storage: FileStorage, make_prompts: MakePrompts
) -> None:
    prompts = make_prompts(2)
    run.write_prompts("train-000000", prompts)
    raw = newer_shard(run, prompts)
    storage.put_if_absent(f"{run.name}/samples/train-000000.parquet", raw)

    with pytest.raises(NewerFile):
        repair.move_aside(run)
    (fault, *_) = verify(run).faults

    assert "of schema version 2" in fault.what
    assert fault.sha256 == ""
    assert run.read_shard("samples", "train-000000") == raw


def test_a_newer_prompt_is_never_half_read() -> None:
    line = json.dumps({"schema_version": 2, "prompt_id": "a" * 32, "split": "train", "messages": [], "new": 1})

    with pytest.raises(NewerFile):
        Prompt.from_json(line)
