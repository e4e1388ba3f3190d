"""What is exported of a run whose rows stand several times, whose shards are damaged, or that is still at work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftfleet import again
from draftfleet.export_data.export import Exported, export
from draftfleet.export_data.kept import Kept
from draftfleet.export_data.units import Wanted
from draftfleet.names import again_id, batch_id, parts_of
from draftfleet.records import Outcome, Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import load

FIRST, SECOND = batch_id("train", 0), batch_id("train", 1)
AGAIN, ONCE_MORE = again_id("train", 0), again_id("train", 1)

Answer = Callable[..., list[Sample]]


@pytest.fixture
def answer(run: Run, make_sample: Callable[..., Sample]) -> Answer:
    """Commit a batch whose rows end in these ways, in order; the content says which batch it was."""

    def commit(batch: str, outcomes: list[Outcome]) -> list[Sample]:
        samples = [
            make_sample(prompt, batch, outcome=outcome, content=batch)
            for prompt, outcome in zip(run.read_prompts(batch), outcomes, strict=True)
        ]
        assert run.commit(batch, samples)
        run.index.flush()
        return samples

    return commit


@pytest.fixture
def asked(run: Run, make_prompts: Callable[..., list[Prompt]]) -> Run:
    for number, batch in enumerate((FIRST, SECOND)):
        run.write_prompts(batch, make_prompts(4, start=4 * number))
    run.seal({"prompts": 8})
    return run


def exported(run: Run, folder: Path, **wanted: object) -> tuple[Exported, list[tuple[int, str]]]:
    """The result, and for each line the number of its question and who answered it."""
    settings = load(flags={"storage.url": run.storage.url, "run": run.name})
    done = export(settings, folder, Wanted(format="jsonl", **wanted))  # type: ignore[arg-type]
    lines = [json.loads(line) for path in folder.glob("data/*") for line in path.read_text().splitlines()]
    return done, [(int(line["messages"][0]["content"][9:-1]), line["content"]) for line in lines]


def test_a_row_that_was_asked_again_is_there_once_with_its_better_record(
    asked: Run, answer: Answer, tmp_path: Path
) -> None:
    bad = answer(FIRST, ["ok", "truncated", "failed", "truncated"])
    again.create(asked, bad[1:], batch_size=8)
    answer(AGAIN, ["ok", "truncated", "failed"])

    done, rows = exported(asked, tmp_path / "out")

    assert rows == [(0, FIRST), (3, FIRST), (1, AGAIN), (2, AGAIN)]
    assert done.outcomes == {"ok": 2, "truncated": 2}


def test_the_best_of_three_records_counts(asked: Run, answer: Answer, tmp_path: Path) -> None:
    bad = answer(FIRST, ["failed", "truncated", "truncated", "ok"])
    again.create(asked, bad[:3], batch_size=8)
    second = answer(AGAIN, ["truncated", "failed", "ok"])
    again.create(asked, second[:2], batch_size=8)
    answer(ONCE_MORE, ["ok", "failed"])

    _, rows = exported(asked, tmp_path / "out")

    assert rows == [(1, FIRST), (3, FIRST), (2, AGAIN), (0, ONCE_MORE)]


def test_a_row_that_is_being_asked_again_keeps_what_there_is_of_it(asked: Run, answer: Answer, tmp_path: Path) -> None:
    bad = answer(FIRST, ["truncated", "failed", "ok", "ok"])
    again.create(asked, bad[:2], batch_size=8)

    done, rows = exported(asked, tmp_path / "out")

    assert rows == [(0, FIRST), (2, FIRST), (3, FIRST)]
    assert (done.complete, done.pending) == (False, 6)


def test_an_original_that_was_done_anew_is_read_and_not_what_was_noted_of_it(
    asked: Run, answer: Answer, tmp_path: Path
) -> None:
    bad = answer(FIRST, ["failed", "ok", "ok", "ok"])
    again.create(asked, bad[:1], batch_size=8)
    answer(AGAIN, ["truncated"])
    asked.set_aside(FIRST)
    answer(FIRST, ["ok", "ok", "ok", "ok"])

    _, rows = exported(asked, tmp_path / "out")

    assert rows == [(number, FIRST) for number in range(4)]


def test_a_batch_that_was_split_gives_each_row_once(asked: Run, answer: Answer, tmp_path: Path) -> None:
    asked.split(FIRST, 4)
    parts = parts_of(FIRST, 4)
    answer(parts[1], ["ok"])
    answer(parts[2], ["truncated"])
    answer(FIRST, ["truncated", "truncated", "ok", "ok"])

    _, rows = exported(asked, tmp_path / "out")

    assert sorted(rows) == [(0, FIRST), (1, parts[1]), (2, FIRST), (3, FIRST)]


def test_a_shard_that_cannot_be_read_is_named_and_the_rest_goes_on(asked: Run, answer: Answer, tmp_path: Path) -> None:
    answer(FIRST, ["ok"] * 4)
    answer(SECOND, ["ok"] * 4)
    asked.storage.local(f"run/samples/{FIRST}.parquet").write_bytes(b"PAR1 and nothing else")
    command = [sys.executable, "-m", "draftfleet", "export-data", "out", "--run", "run", "--storage", asked.storage.url]

    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    said = json.loads(ended.stdout)
    assert ended.returncode == 1
    assert (said["corrupt"], said["lines"], said["complete"]) == ([FIRST], 4, False)
    assert f"shard skipped run=run batch={FIRST}" in ended.stderr
    assert f"1 shards could not be read and are missing:** {FIRST}" in (tmp_path / "out/README.md").read_text()


def test_where_the_better_record_cannot_be_read_the_other_one_counts(
    asked: Run, answer: Answer, tmp_path: Path
) -> None:
    bad = answer(FIRST, ["truncated", "ok", "ok", "ok"])
    again.create(asked, bad[:1], batch_size=8)
    answer(AGAIN, ["ok"])
    asked.storage.local(f"run/samples/{AGAIN}.parquet").write_bytes(b"")

    done, rows = exported(asked, tmp_path / "out")

    assert (rows[0], done.corrupt) == ((0, FIRST), [AGAIN])


def test_a_run_at_work_is_exported_as_far_as_it_is_and_says_so(asked: Run, answer: Answer, tmp_path: Path) -> None:
    answer(SECOND, ["ok"] * 4)

    done, rows = exported(asked, tmp_path / "out")

    assert len(rows) == 4
    assert (done.complete, done.pending) == (False, 4)
    assert "8 samples were expected, 4 were pending" in (tmp_path / "out/README.md").read_text()


def test_a_shard_that_was_moved_aside_meanwhile_is_left_out(asked: Run, answer: Answer) -> None:
    answer(FIRST, ["ok"] * 4)
    answer(SECOND, ["ok"] * 4)
    kept = Kept(asked)
    asked.set_aside(FIRST)

    batches = list(kept.batches("train"))

    assert [len(samples) for samples in batches] == [0, 4]
    assert kept.corrupt == {}


def test_batches_come_in_order_of_their_numbers(
    run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]
) -> None:
    for number in (1_000_000, 999_999, 2):
        batch = batch_id("train", number)
        run.commit(batch, [replace(make_sample(make_prompts(1, start=number)[0], batch))])

    order = [sample.batch for samples in Kept(run).batches("train") for sample in samples]

    assert order == [batch_id("train", number) for number in (2, 999_999, 1_000_000)]


def test_few_batches_are_held_at_once(
    run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]
) -> None:
    for number in range(40):
        batch = batch_id("train", number)
        run.commit(batch, [make_sample(make_prompts(1, start=number)[0], batch)])
    read: list[str] = []
    whole = run.read_samples
    run.read_samples = lambda batch: (read.append(batch), whole(batch))[1]  # type: ignore[method-assign]

    for number, _ in enumerate(Kept(run).batches("train"), 1):
        assert len(read) <= number + 5

    assert len(read) == 40
