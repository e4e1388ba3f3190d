"""`draftfleet verify`: whatever is not sound is told, the index is mended, and a repair brings the run to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from draftfleet.accounting import Accountant
from draftfleet.names import batch_id, parts_of
from draftfleet.queue import connect, queued
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.verify import Found, show, verify

FIRST, SPLIT, WAITING = (batch_id("train", number) for number in range(3))
MODEL = "tiny"


@pytest.fixture
def sound(run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]) -> Run:
    """One batch is done, one was split and one of its rows is done, one waits."""
    for number, batch in enumerate((FIRST, SPLIT, WAITING)):
        run.write_prompts(batch, make_prompts(4, start=4 * number))
    run.split(SPLIT, 4)
    for batch in (FIRST, parts_of(SPLIT, 4)[2]):
        run.commit(batch, [make_sample(prompt, batch) for prompt in run.read_prompts(batch)])
    run.seal({"prompts": 12})
    run.index.flush()
    return run


def shard(run: Run, batch: str) -> Path:
    return run.storage.local(f"run/samples/{batch}.parquet")


def again(run: Run) -> Found:
    return verify(Run.open(run.storage, run.name))


def told(run: Run) -> list[tuple[str, str]]:
    return [(fault.batch, fault.what) for fault in again(run).faults]


def test_a_sound_run_is_read_whole_and_called_sound(sound: Run) -> None:
    found = again(sound)

    assert (found.faults, found.lines_written) == ([], 0)
    assert (found.sample_shards, found.prompt_shards, found.rows) == (2, 3, 5)
    assert found.bytes == sum(path.stat().st_size for path in sound.storage.local("run").glob("*s/*-0*"))


def test_any_flipped_byte_of_a_shard_is_found(sound: Run) -> None:
    path = shard(sound, FIRST)
    raw = path.read_bytes()

    for where in range(0, len(raw), max(1, len(raw) // 40)):
        path.write_bytes(raw[:where] + bytes([raw[where] ^ 0x10]) + raw[where + 1 :])
        assert [batch for batch, _ in told(sound)] == [FIRST], f"byte {where}"


def test_a_flipped_byte_in_a_page_is_found_without_the_index(sound: Run) -> None:
    for path in sound.storage.local("run/index").glob("*"):
        path.unlink()
    path = shard(sound, FIRST)
    raw = path.read_bytes()
    where = raw.index(b"\x28\xb5\x2f\xfd") + 12  # inside the first zstd frame
    path.write_bytes(raw[:where] + bytes([raw[where] ^ 0x10]) + raw[where + 1 :])

    assert [batch for batch, _ in told(sound)] == [FIRST]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda samples: samples[:3], "3 rows for 4 prompts: 1 are missing, 0 were not asked"),
        (lambda samples: [*samples, samples[0]], "5 rows for 4 prompts: 0 are missing, 0 were not asked"),
        (lambda samples: [*samples[:3], replace(samples[3], row_key="x")], "1 are missing, 1 were not asked"),
        (lambda samples: [replace(samples[0], run_id="0" * 32), *samples[1:]], "run_id is 0000"),
        (lambda samples: [replace(samples[0], batch=WAITING), *samples[1:]], f"batch is {WAITING}"),
    ],
    ids=["a row lost", "a row doubled", "another row", "another run", "another batch"],
)
def test_a_shard_that_does_not_answer_its_prompts_is_told(
    sound: Run, change: Callable[[list[Sample]], list[Sample]], what: str
) -> None:
    samples = sound.read_samples(FIRST)
    shard(sound, FIRST).unlink()
    sound.commit(FIRST, change(samples))
    sound.index.flush()

    [fault] = [fault for fault in again(sound).faults if fault.batch]

    assert fault.batch == FIRST
    assert what in fault.what
    assert "verify run --repair" in fault.do


def test_prompt_shards_that_are_damaged_replaced_or_gone_are_told(
    sound: Run, make_prompts: Callable[..., list[Prompt]]
) -> None:
    path = sound.storage.local(f"run/prompts/{FIRST}.jsonl.gz")
    raw = path.read_bytes()

    path.write_bytes(raw[:40])
    assert any(batch == FIRST and "prompt shard cannot be read" in what for batch, what in told(sound))
    path.unlink()
    assert any(batch == FIRST and "no prompt shard" in what for batch, what in told(sound))
    sound.write_prompts(FIRST, make_prompts(4, start=90))
    assert any(batch == FIRST and "not the one that was produced" in what for batch, what in told(sound))
    path.write_bytes(raw)
    assert told(sound) == []


def test_lines_that_are_missing_or_wrong_are_written_and_are_no_fault(sound: Run) -> None:
    [path] = sound.storage.local("run/index").glob("*")
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if FIRST not in line and WAITING not in line]
    wrong = replace(sound.entry("samples", FIRST), rows=9)
    path.write_text("".join([*kept, wrong.to_line()]))

    found = again(sound)

    assert (found.faults, found.lines_written) == ([], 3)
    assert again(sound).lines_written == 0
    entry = Run.open(sound.storage, "run").index.read()[FIRST]
    assert (entry.rows, entry.counts) == (4, sound.counts(FIRST))


def test_rows_that_do_not_add_up_are_a_fault(sound: Run) -> None:
    sound.seal({"prompts": 13})

    assert told(sound) == [("", "12 rows are known, and the producer made 13")]


def test_a_repair_moves_aside_what_is_at_fault_and_has_it_done_again(
    sound: Run, settings: Settings, capsys: pytest.CaptureFixture[str], make_sample: Callable[..., Sample]
) -> None:
    client: redis.Redis = connect(settings)
    path = shard(sound, FIRST)
    path.write_bytes(path.read_bytes()[:-1])

    def run_verify(*, repair: bool) -> dict[str, Any]:
        code = show(settings, repair=repair, as_json=True, progress=False)
        return {"code": code, **json.loads(capsys.readouterr().out)}

    assert (run_verify(repair=False)["code"], path.exists()) == (1, True)
    repaired = run_verify(repair=True)

    assert (repaired["code"], repaired["moved"], path.exists()) == (1, [FIRST], False)
    assert queued(client, MODEL) >= 1
    assert len(list(sound.storage.local("run/corrupt").iterdir())) == 1
    assert run_verify(repair=False)["code"] == 0
    sound = Run.open(sound.storage, "run")
    sound.commit(FIRST, [make_sample(prompt, FIRST) for prompt in sound.read_prompts(FIRST)])
    assert Accountant(sound).account().ok == 5
    assert run_verify(repair=False)["faults"] == []


def test_a_shard_that_was_done_anew_since_it_was_found_at_fault_is_left_alone(
    sound: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard(sound, FIRST)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    monkeypatch.setattr("draftfleet.verify.set_aside", lambda run, batches: pytest.fail("was moved") if batches else [])
    found = again(sound)

    monkeypatch.setattr("draftfleet.verify.verify", lambda *_, **__: (path.write_bytes(raw), found)[1])

    assert show(settings, repair=True, as_json=False, progress=False) == 1


def test_what_a_person_reads_names_each_fault_with_what_to_do(
    sound: Run, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(settings, repair=False, as_json=False, progress=False) == 0
    assert "run run: 2 sample shards with 5 rows and 3 prompt shards" in (said := capsys.readouterr().out)
    assert "all is sound" in said

    shard(sound, FIRST).write_bytes(b"")
    assert show(settings, repair=False, as_json=False, progress=False) == 1
    assert f"{FIRST}: its sample shard is at fault: its checksum is not the one in the index" in capsys.readouterr().out


def test_the_line_of_a_shard_done_anew_while_it_is_verified_is_looked_up_again(
    sound: Run, make_sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Run.open(sound.storage, "run")
    read = reader.read_shard

    def done_anew(kind: Any, batch: str) -> bytes:
        if (kind, batch) == ("samples", FIRST):
            mender = Run.open(sound.storage, "run")
            mender.set_aside(FIRST)
            mender.commit(FIRST, [make_sample(p, FIRST, content="New.") for p in sound.read_prompts(FIRST)])
            mender.index.flush()
        return read(kind, batch)

    monkeypatch.setattr(reader, "read_shard", done_anew)

    assert verify(reader).faults == []
    assert reader.index.read()[FIRST].same_shard(reader.entry("samples", FIRST))
