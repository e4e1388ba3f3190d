"""The verb: what it reads, what it leaves out, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftfleet import tokens
from draftfleet.errors import RunMissing, StorageUnwritable
from draftfleet.names import batch_id
from draftfleet.outcomes import Counts
from draftfleet.records import Prompt, Sample, Turn
from draftfleet.report import Options, report
from draftfleet.report.browser import chosen
from draftfleet.report.pieces import Pieces
from draftfleet.report.rows import read
from draftfleet.report.spread import Spread, Times, covered
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.storage import FileStorage, open_storage
from draftfleet.testing.workers import changed

MakePrompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]
TINY_TARGET = Path(__file__).parents[3] / "examples/tiny-target"


def commit(run: Run, number: int, samples: list[Sample]) -> str:
    name = batch_id("train", number)
    run.commit(name, samples)
    run.index.flush()
    return name


def test_the_verb_writes_the_file_and_imports_no_torch(
    run: Run, settings: Settings, make_prompts: MakePrompts, make_sample: MakeSample, tmp_path: Path
) -> None:
    commit(run, 0, [make_sample(one, started_at=1e9, seconds=1.0, server="a") for one in make_prompts(3)])
    code = "import sys; sys.modules['torch'] = None; from draftfleet import cli; cli.main()"

    said = subprocess.run(
        [sys.executable, "-c", code, "report", "run", "--out", "there/it.html", "--target", str(TINY_TARGET)],
        cwd=tmp_path, env=environment(settings), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert said.returncode == 0, said.stderr
    assert "report written to there/it.html" in said.stderr
    assert (tmp_path / "there/it.html").read_text().startswith("<!DOCTYPE html>")
    assert [one.name for one in (tmp_path / "there").iterdir()] == ["it.html"]


def test_a_shard_that_cannot_be_read_is_named_and_left_out(
    run: Run,
    settings: Settings,
    storage: FileStorage,
    make_prompts: MakePrompts,
    make_sample: MakeSample,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(6)
    for number in range(3):
        name, some = batch_id("train", number), prompts[2 * number : 2 * number + 2]
        run.write_prompts(name, some)
        commit(run, number, [make_sample(one, name) for one in some])
    path = storage.root / "run/samples" / f"{batch_id('train', 1)}.parquet"
    path.write_bytes(path.read_bytes()[:-60])

    said = report(settings, Options(file=str(tmp_path / "it.html")), progress=False)

    assert said.corrupt == [batch_id("train", 1)]
    assert said.rows == 4
    text = (tmp_path / "it.html").read_text()
    assert "1 of 3 shards could not be read" in text
    assert batch_id("train", 1) in text


def test_a_run_that_is_not_there_is_refused_with_the_names_that_are(
    run: Run, settings: Settings, tmp_path: Path
) -> None:
    with pytest.raises(RunMissing, match=r"run rum is not in .*\nRuns that are there: run"):
        report(settings.model_copy(update={"run": "rum"}), Options(), progress=False)


def test_an_earlier_file_is_replaced_and_a_folder_is_refused(run: Run, settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "it.html"
    file.write_text("what was there")

    report(settings, Options(file=str(file)), progress=False)

    assert "what was there" not in file.read_text()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageUnwritable, match="Name another file with --out"):
        report(settings, Options(file=str(tmp_path / "folder")), progress=False)
    assert not list(tmp_path.glob(".folder*"))


def test_a_run_in_an_object_store_has_a_report(
    settings: Settings, s3_url: str, make_prompts: MakePrompts, make_sample: MakeSample, tmp_path: Path
) -> None:
    storage = open_storage(s3_url)
    run = Run.create(storage, "run", {"target.model": "tiny"}, {})
    run.commit("train-000000", [make_sample(one) for one in make_prompts(2)])

    said = report(changed(settings, storage__url=s3_url), Options(file=str(tmp_path / "it.html")), progress=False)

    assert (said.rows, said.samples) == (2, 2)


def test_rows_count_as_the_accounting_counts_them(run: Run, make_prompts: MakePrompts, make_sample: MakeSample) -> None:
    one, other, third = make_prompts(3)
    turn = Turn(message=1, token_ids=[1, 2], ids_source="engine", completion_tokens=2, seconds=4.0, server="b")
    first = [
        make_sample(one, outcome="failed", error="x"),
        make_sample(other, turns=[turn], started_at=100.0, seconds=2.0, server="a"),
        make_sample(third, outcome="truncated"),
    ]
    again = [make_sample(one, batch_id("train", 1), outcome="ok")]
    commit(run, 0, first), commit(run, 1, again)
    run.bury("train-000002.0000", make_sample(third, "train-000002.0000", outcome="failed", error="gone"))

    found = read(run, run.done())

    assert len(found.records) == 5
    assert {row.row_key: row.outcome for row in found.rows} == {
        one.row_key: "ok", other.row_key: "ok", third.row_key: "truncated"
    }  # fmt: skip
    assert sum(row.tokens for row in found.rows) == Counts.of([*again, *first[1:]]).tokens
    conversation = next(row for row in found.rows if row.earlier)
    assert [tuple(asked) for asked in conversation.requests] == [("b", 96.0, 100.0, 2), ("a", 100.0, 102.0, 3)]


def test_rows_are_drawn_by_their_seed_whatever_their_order(
    run: Run, make_prompts: MakePrompts, make_sample: MakeSample
) -> None:
    samples = [
        make_sample(one, completion_tokens=at + 1, seconds=1.0 + at, outcome="failed" if at in (3, 4) else "ok",
                    error="x" if at in (3, 4) else None, error_kind="crash" if at == 3 else "transient")
        for at, one in enumerate(make_prompts(60))
    ]  # fmt: skip
    commit(run, 0, samples)
    found = read(run, run.done())
    drawn = {row.row_key: why for row, why in chosen(found, 5, 1)}

    found.rows.reverse()

    assert {row.row_key: why for row, why in chosen(found, 5, 1)} == drawn
    assert {row.row_key for row, _ in chosen(found, 5, 2)} != set(drawn)
    assert sum("random" in why for why in drawn.values()) == 5
    assert sum("failed" in why for why in drawn.values()) == 2
    assert "longest" in drawn[samples[59].row_key]
    assert chosen(found, 0, 1) == []


def test_an_amount_is_spread_over_the_time_that_it_took() -> None:
    times = Times(0.0, 10.0)
    spread = Spread(times)

    spread.add(1.5, 4.5, 30)
    spread.add(7.2, 7.2, 5)

    assert times.width == 1
    assert spread.values()[:8] == pytest.approx([0, 5, 10, 10, 5, 0, 0, 5])
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    assert Times(0, 40 * 86400).count <= 144


def test_the_texts_of_tokens_make_up_the_text_of_all() -> None:
    tokenizer = tokens.load(TINY_TARGET)
    text = "The answer is **43** – ünïcödé, 漢字, 🜁!\n"
    ids = tokenizer.encode(text)

    pieces = Pieces(tokenizer).of(ids)

    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
