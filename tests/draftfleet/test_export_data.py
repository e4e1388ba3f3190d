"""`draftfleet export-data`: each format is read back by its own reader, and what is left out is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftfleet.errors import DataError, DraftfleetError, SettingsError
from draftfleet.export_data.export import Exported, export
from draftfleet.export_data.formats import FORMATS
from draftfleet.export_data.units import Wanted
from draftfleet.names import batch_id
from draftfleet.records import Prompt, Sample, Turn, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import Settings, load

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "x"]}'}}]
DRAWN = {"temperature": 0.3}

Export = Callable[..., Exported]


@pytest.fixture
def settings(run: Run) -> Settings:
    return load(flags={"storage.url": run.storage.url, "run": run.name})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def export_(settings: Settings, folder: Path) -> Export:
    return lambda overwrite=False, **wanted: export(settings, folder, Wanted(**wanted), overwrite=overwrite)


@pytest.fixture
def filled(run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]) -> Run:
    """Two batches to train on and one held out: an answer with a thought, a cut one, one that failed, and tools."""
    for number, batch in enumerate((batch_id("train", 0), batch_id("train", 1))):
        prompts = make_prompts(4, start=10 * number)
        run.write_prompts(batch, prompts)
        run.commit(
            batch,
            [
                make_sample(prompts[0], batch, reasoning="Hm.", drawn=DRAWN),
                make_sample(prompts[1], batch, outcome="truncated", finish_reason="length", content=None),
                make_sample(prompts[2], batch, outcome="failed", token_ids=[], ids_source="none", error="no"),
                make_sample(prompts[3], batch, tools=TOOLS, tool_calls=CALLS, content=None, finish_reason="tool_calls"),
            ],
        )
    [heldout] = make_prompts(1, split="heldout", start=90)
    run.write_prompts(batch_id("heldout", 0), [heldout])
    run.commit(batch_id("heldout", 0), [make_sample(heldout, batch_id("heldout", 0))])
    run.seal({"prompts": 9})
    run.index.flush()
    return run


@pytest.fixture
def talk(run: Run, make_sample: Callable[..., Sample]) -> Sample:
    """A conversation of two answers; the ids of the first are retokenized."""
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1", "reasoning_content": "First."},
        {"role": "user", "content": "Two?"},
    ]
    turn = Turn(
        message=1,
        finish_reason="stop",
        prompt_token_ids=[5],
        token_ids=[6, 2],
        ids_source="retokenized",
        completion_tokens=2,
    )
    sample = make_sample(Prompt(prompt_id(messages, None), "train", messages), reasoning="Second.", content="2")
    sample = replace(sample, turns=[turn])
    run.commit(batch_id("train", 0), [sample])
    run.index.flush()
    return sample


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob(name)) for line in path.read_text().splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_json_lines_hold_messages_thought_calls_and_ids_as_they_are(filled: Run, folder: Path, export_: Export) -> None:
    done = export_(format="jsonl")

    found = lines(folder, "data/train-*-of-00001.jsonl")
    first, cut, called = found[:3]
    assert len(found) == 6
    assert len(lines(folder, "data/heldout-*.jsonl")) == 1
    assert first["messages"] == [{"role": "user", "content": "Question 0?"}]
    assert (first["reasoning"], first["content"], first["drawn"]) == ("Hm.", "Answer.", DRAWN)
    assert (first["prompt_token_ids"], first["token_ids"], first["ids_match_usage"]) == ([5, 6, 7], [8, 9, 2], True)
    assert (cut["outcome"], cut["finish_reason"], cut["content"]) == ("truncated", "length", None)
    assert (called["tools"], called["tool_calls"]) == (TOOLS, CALLS)
    assert (done.lines, done.splits, done.complete) == (7, {"train": 6, "heldout": 1}, True)
    assert (done.outcomes, done.left_out) == ({"ok": 5, "truncated": 2}, {"failed": 2})
    assert (done.prompt_tokens, done.completion_tokens) == (21, 21)


def test_compressed_json_lines_are_the_plain_ones(filled: Run, settings: Settings, tmp_path: Path) -> None:
    export(settings, tmp_path / "plain", Wanted(format="jsonl"))
    export(settings, tmp_path / "zst", Wanted(format="jsonl.zst"))

    [plain] = (tmp_path / "plain/data").glob("train-*")
    [packed] = (tmp_path / "zst/data").glob("train-*")
    with pa.OSFile(str(packed), "rb") as raw, pa.CompressedInputStream(raw, "zstd") as unpacked:
        assert unpacked.read() == plain.read_bytes()


def test_parquet_has_typed_columns_and_json_as_text(filled: Run, folder: Path, export_: Export) -> None:
    export_(format="parquet")

    [path] = (folder / "data").glob("train-*")
    rows = pq.read_table(path, page_checksum_verification=True).to_pylist()
    assert [row["key"] for row in rows] == [
        sample.row_key
        for batch in ("train-000000", "train-000001")
        for sample in filled.read_samples(batch)
        if sample.outcome != "failed"
    ]
    assert json.loads(rows[2]["tools"]) == TOOLS
    assert json.loads(rows[2]["tool_calls"]) == CALLS
    assert rows[0]["messages"][0]["content"] == "Question 0?"
    assert rows[0]["token_ids"] == [8, 9, 2]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "jsonl.zst"])
@pytest.mark.parametrize("turns", ["rows", "conversations"])
def test_datasets_loads_every_format_by_its_card(
    filled: Run, folder: Path, export_: Export, tmp_path: Path, name: str, turns: Any
) -> None:
    from datasets import load_dataset

    if (name, turns) == ("speculators", "conversations"):
        with pytest.raises(SettingsError, match="use --turns rows"):
            export_(format=name, turns=turns)
        return
    export_(format=name, turns=turns)

    loaded = load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))

    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 6, "heldout": 1}


@pytest.mark.parametrize("turns", ["rows", "conversations"])
def test_the_arrow_folder_is_what_datasets_would_have_saved(
    filled: Run, folder: Path, export_: Export, tmp_path: Path, turns: Any
) -> None:
    from datasets import load_from_disk

    export_(format="arrow", turns=turns)
    loaded = load_from_disk(str(folder))
    loaded.save_to_disk(str(tmp_path / "again"))

    assert loaded["train"][0]["messages"][0]["content"] == "Question 0?"
    again = load_from_disk(str(tmp_path / "again"))
    assert again["train"].features == loaded["train"].features
    assert again["train"].to_list() == loaded["train"].to_list()
    ours, theirs = (json.loads((root / "train/state.json").read_text()) for root in (folder, tmp_path / "again"))
    assert ours.keys() == theirs.keys()
    ours, theirs = (json.loads((root / "train/dataset_info.json").read_text()) for root in (folder, tmp_path / "again"))
    assert ours["features"] == theirs["features"]


def test_specforge_gets_ids_and_a_mask_that_is_one_on_the_answer(filled: Run, folder: Path, export_: Export) -> None:
    export_(format="specforge")

    assert [set(line) for line in lines(folder, "train.jsonl")] == [{"id", "input_ids", "loss_mask"}] * 6
    assert lines(folder, "heldout.jsonl")[0]["input_ids"] == [5, 6, 7, 8, 9, 2]
    assert lines(folder, "heldout.jsonl")[0]["loss_mask"] == [0, 0, 0, 1, 1, 1]


def test_specforge_gets_conversations_whose_fields_are_text(talk: Sample, folder: Path, export_: Export) -> None:
    export_(format="specforge", turns="conversations")

    [line] = lines(folder, "train.jsonl")
    assert line == {
        "id": talk.row_key,
        "conversations": [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1", "reasoning_content": "First."},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "2", "reasoning_content": "Second."},
        ],
        "tools": "[]",
    }


def test_specforge_gets_tools_and_calls_as_json_text(filled: Run, folder: Path, export_: Export) -> None:
    export_(format="specforge", turns="conversations")

    line = lines(folder, "train.jsonl")[2]
    assert json.loads(line["tools"]) == TOOLS
    assert json.loads(line["conversations"][-1]["tool_calls"]) == CALLS


def test_speculators_gets_a_folder_of_tensors_per_split(filled: Run, folder: Path, export_: Export) -> None:
    torch = pytest.importorskip("torch")
    from datasets import load_from_disk

    export_(format="speculators")

    loaded = load_from_disk(str(folder / "train"))
    assert loaded.with_format(None)["seq_len"] == [6] * 6
    assert torch.equal(loaded[0]["input_ids"], torch.tensor([5, 6, 7, 8, 9, 2]))
    assert torch.equal(loaded[0]["loss_mask"], torch.tensor([0, 0, 0, 1, 1, 1]))


def test_each_answer_of_a_conversation_is_a_row_on_its_own_prefix(talk: Sample, folder: Path, export_: Export) -> None:
    export_(format="jsonl")

    first, second = lines(folder, "data/*.jsonl")
    assert (first["turn"], first["reasoning"], first["content"], first["token_ids"]) == (0, "First.", "1", [6, 2])
    assert (second["turn"], second["reasoning"], second["content"]) == (1, "Second.", "2")
    assert (first["messages"], second["messages"]) == (talk.messages[:1], talk.messages)
    assert first["key"] != second["key"]


def test_a_conversation_is_one_line_whose_thoughts_are_in_fields_or_inline(
    talk: Sample, folder: Path, export_: Export
) -> None:
    export_(format="jsonl", turns="conversations")
    [line] = lines(folder, "data/*.jsonl")
    export_(format="jsonl", turns="conversations", reasoning="inline", overwrite=True)
    [inline] = lines(folder, "data/*.jsonl")

    assert (line["answers"], line["messages"][-1]["reasoning_content"]) == (2, "Second.")
    assert [message["content"] for message in inline["messages"]] == [
        "One?",
        "<think>\nFirst.\n</think>\n\n1",
        "Two?",
        "<think>\nSecond.\n</think>\n\n2",
    ]
    assert all("reasoning_content" not in message for message in inline["messages"])


def test_a_row_with_its_thought_inline_has_no_field_for_it(filled: Run, folder: Path, export_: Export) -> None:
    export_(format="jsonl", reasoning="inline")

    row = lines(folder, "data/train-*.jsonl")[0]
    assert (row["reasoning"], row["content"]) == (None, "<think>\nHm.\n</think>\n\nAnswer.")


def test_exact_leaves_retokenized_answers_out_and_ends_a_conversation_before_them(
    talk: Sample, folder: Path, export_: Export
) -> None:
    done = export_(format="jsonl", exact=True)

    assert [line["turn"] for line in lines(folder, "data/*.jsonl")] == [1]
    assert done.left_out == {"ids not exact": 1}
    with pytest.raises(DataError, match=r"no row to export as jsonl \(1 ids not exact\)"):
        export_(format="jsonl", exact=True, turns="conversations", overwrite=True)


@pytest.mark.parametrize("name", ["specforge", "speculators"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"completion_tokens": 9}, "ids differ from usage"),
        ({"token_ids": [], "ids_source": "none"}, "no ids"),
        ({"prompt_token_ids": []}, "no ids"),
    ],
)
def test_a_form_of_ids_has_no_row_whose_ids_are_not_sure(
    run: Run,
    export_: Export,
    make_prompts: Callable[..., list[Prompt]],
    make_sample: Callable[..., Sample],
    name: str,
    fields: dict[str, Any],
    reason: str,
) -> None:
    good, bad = make_prompts(2)
    run.commit(batch_id("train", 0), [make_sample(good), make_sample(bad, **fields)])

    done = export_(format=name)

    assert (done.lines, done.left_out) == (1, {reason: 1})


def test_splits_outcomes_and_a_limit_choose_rows(filled: Run, folder: Path, export_: Export) -> None:
    done = export_(format="jsonl", splits=("train",), outcomes=("ok",), limit=3)

    assert done.splits == {"train": 3}
    assert {line["outcome"] for line in lines(folder, "data/*.jsonl")} == {"ok"}
    assert not list(folder.glob("data/heldout*"))


def test_two_exports_are_the_same_byte_for_byte(filled: Run, settings: Settings, tmp_path: Path) -> None:
    for name in FORMATS:
        for copy in ("a", "b"):
            export(settings, tmp_path / copy / name, Wanted(format=name))

    kept = {path: raw for path, raw in files(tmp_path / "a").items() if Path(path).name not in _DATED}
    assert kept == {path: raw for path, raw in files(tmp_path / "b").items() if Path(path).name not in _DATED}
    assert len(kept) > len(FORMATS)


_DATED = ("README.md", "export.json")


@pytest.mark.parametrize("name", ["jsonl", "jsonl.zst", "parquet", "arrow", "speculators"])
def test_large_exports_are_several_files_that_say_how_many(
    run: Run,
    folder: Path,
    export_: Export,
    make_prompts: Callable[..., list[Prompt]],
    make_sample: Callable[..., Sample],
    name: str,
) -> None:
    from random import Random

    dice = Random(0)
    for number in range(16):
        batch = batch_id("train", number)
        ids = [dice.choices(range(150_000), k=20_000) for _ in range(4)]
        prompts = zip(make_prompts(4, start=4 * number), ids, strict=True)
        run.commit(batch, [make_sample(one, batch, token_ids=its, completion_tokens=20_000) for one, its in prompts])

    done = export_(format=name, file_mb=1)

    pieces = sorted(folder.rglob("*-of-*"))
    assert len(pieces) > 1
    assert all(f"-of-{len(pieces):05d}." in path.name for path in pieces)
    assert all(path.stat().st_size < 3_000_000 for path in pieces)
    assert done.lines == 64
    if name == "parquet":
        assert sum(pq.read_metadata(path).num_rows for path in pieces) == 64


def test_an_export_is_replaced_only_when_told_and_another_folder_never(
    filled: Run, folder: Path, export_: Export, tmp_path: Path, settings: Settings
) -> None:
    export_(format="jsonl")
    with pytest.raises(SettingsError, match="holds an export already"):
        export_(format="parquet")
    export_(format="parquet", overwrite=True)
    assert {path.suffix for path in folder.glob("data/*")} == {".parquet"}

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    with pytest.raises(SettingsError, match="no export of draftfleet"):
        export(settings, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine/thesis.tex").exists()


def test_an_export_that_fails_leaves_nothing_and_the_earlier_one_alone(
    filled: Run, folder: Path, export_: Export, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    export_(format="jsonl")
    before = files(folder)
    monkeypatch.setattr("draftfleet.export_data.card.TEMPLATE", tmp_path / "not there")

    with pytest.raises(FileNotFoundError):
        export_(format="parquet", overwrite=True)

    assert files(folder) == before
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_a_run_without_answers_is_told(run: Run, export_: Export, folder: Path) -> None:
    with pytest.raises(DataError, match=r"run run has no row to export as parquet \(no samples yet\)"):
        export_()

    assert not folder.exists()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"format": "csv"}, "use one of jsonl, jsonl.zst, parquet, arrow, specforge, speculators"),
        ({"limit": 0}, "--limit 0: it is at least 1"),
        ({"file_mb": 0}, "--file-mb 0: it is at least 1"),
    ],
)
def test_a_wrong_option_is_told(filled: Run, export_: Export, wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(DraftfleetError, match=said):
        export_(**wanted)


def test_the_command_line_exports_and_says_what(filled: Run, folder: Path, tmp_path: Path) -> None:
    def call(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftfleet", "export-data", str(folder), "--run", "run", *args]
        command += ["--storage", filled.storage.url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)

    good = call("--format", "jsonl", "--split", "train", "--outcomes", "truncated", "--turns", "conversations")
    bad = call("--outcomes", "ok,failed")
    lonely = call("--private")

    said = json.loads(good.stdout)
    assert (good.returncode, said["lines"], said["splits"]) == (0, 2, {"train": 2})
    assert "exported" in good.stderr
    assert (bad.returncode, lonely.returncode) == (2, 2)
    assert "--outcomes ok,failed: use ok, truncated" in bad.stderr
    assert "name the repository with --push-to-hub" in lonely.stderr
    assert f"draftfleet export-data {folder} --run run --format jsonl" in (folder / "README.md").read_text()
