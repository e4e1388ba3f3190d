"""The data card: every number on it is one of the rows, and nothing on it is for us alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftfleet.export_data.card import size_category
from draftfleet.export_data.export import export
from draftfleet.export_data.tally import histogram, quantiles
from draftfleet.export_data.units import Wanted
from draftfleet.names import batch_id
from draftfleet.records import Prompt, Sample
from draftfleet.redaction import remember
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage

SOURCE = {"kind": "jsonl", "path": "/home/someone/secret-project/chats.jsonl", "sha256": "abcd", "modified_at": 1.0}
CONTENT = {"target.model": "tiny", "target.fingerprint": "f00d", "sampling.temperature": 0.7, "sampling.extra": "a|b"}


@pytest.fixture
def run(storage: FileStorage) -> Run:
    return Run.create(storage, "run", CONTENT, {"data.source": SOURCE, "host": "node-17", "command": "x"})


@pytest.fixture
def settings(run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]) -> Settings:
    batch = batch_id("train", 0)
    prompts = make_prompts(5)
    run.write_prompts(batch, prompts)
    where = {"server": "http://10.1.2.3:8000", "worker": "node-17-99", "model": "tiny"}
    samples = [
        make_sample(prompts[0], batch, reasoning="Hm.", drawn={"temperature": 0.3}, **where),
        make_sample(prompts[1], batch, drawn={"temperature": 0.9}, **where),
        make_sample(prompts[2], batch, drawn={"temperature": 0.9}, **where),
        make_sample(prompts[3], batch, outcome="truncated", finish_reason="length", ids_source="retokenized", **where),
        make_sample(prompts[4], batch, outcome="failed", **where),
    ]
    run.commit(batch, samples)
    run.seal({"prompts": 5})
    run.index.flush()
    return load(flags={"storage.url": run.storage.url, "run": "run"})


def card(settings: Settings, folder: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """Front matter and text."""
    export(settings, folder, Wanted(format="parquet"), **options)
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_front_matter_is_what_the_hub_reads(settings: Settings, tmp_path: Path) -> None:
    front, _ = card(settings, tmp_path / "out", license="apache-2.0")

    assert front == {
        "license": "apache-2.0",
        "task_categories": ["text-generation"],
        "tags": ["draftfleet", "speculative-decoding", "synthetic"],
        "size_categories": ["n<1K"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
    }


@pytest.mark.parametrize(
    "row",
    [
        "| train | 4 | 4 | 3 | 1 |",
        "| stop | 3 |",
        "| length | 1 |",
        "| with reasoning | 1 | 25.0 % |",
        "| ids: engine | 3 | 75.0 % |",
        "| ids: retokenized | 1 | 25.0 % |",
        "| failed | 1 |",
        "| completion tokens | min | p5 | p50 | p95 | p99 | max |",
        '| `{"temperature": 0.9}` | 2 | 50.0 % |',
        "| `sampling.temperature` | 0.7 |",
        "| `sampling.extra` | a\\|b |",
        "| fingerprint of its tokenizer and template | `f00d` |",
        "| path | chats.jsonl |",
        "| sha256 | abcd |",
        "| licence | not known: see the data set itself |",
    ],
)
def test_the_card_says(settings: Settings, tmp_path: Path, row: str) -> None:
    _, text = card(settings, tmp_path / "out")

    assert f"{row}\n" in text


def test_the_card_names_the_run_the_version_and_the_date(settings: Settings, run: Run, tmp_path: Path) -> None:
    import draftfleet

    _, text = card(settings, tmp_path / "out")

    assert f"id `{run.run_id}`" in text
    assert f", draftfleet {draftfleet.__version__} |" in text
    assert "not complete" not in text
    assert "12 tokens that `tiny` wrote" in " ".join(text.split())


def test_no_folder_host_or_server_of_ours_is_on_the_card(settings: Settings, tmp_path: Path) -> None:
    remember(["hunter2-hunter2"])
    card(settings, tmp_path / "out")

    for name in ("README.md", "export.json"):
        text = (tmp_path / "out" / name).read_text()
        for private in ("secret-project", "node-17", "10.1.2.3"):
            assert private not in text, name


def test_the_files_are_named_with_their_hashes(settings: Settings, tmp_path: Path) -> None:
    import hashlib

    card(settings, tmp_path / "out")

    said = json.loads((tmp_path / "out/export.json").read_text())
    for one in said["files"]:
        raw = (tmp_path / "out" / one["path"]).read_bytes()
        assert (one["bytes"], one["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert [one["path"] for one in said["files"]] == ["data/train-00000-of-00001.parquet"]
    assert (said["run"], said["wanted"]["format"], said["complete"]) == ("run", "parquet", True)


def test_a_mixture_is_listed_source_by_source(
    storage: FileStorage,
    make_prompts: Callable[..., list[Prompt]],
    make_sample: Callable[..., Sample],
    tmp_path: Path,
) -> None:
    sources = [{"kind": "hub", "name": "a/b", "license": "mit"}, {"kind": "hub", "name": "c/d"}]
    run = Run.create(storage, "mixed", CONTENT, {"data.source": {"kind": "mixture", "sources": sources}})
    run.commit(batch_id("train", 0), [make_sample(make_prompts(1)[0])])

    _, text = card(load(flags={"storage.url": storage.url, "run": "mixed"}), tmp_path / "out")

    assert text.count("| name | ") == 2
    assert "| license | mit |" in text
    assert text.count("licence | not known") == 1


def test_quantiles_are_of_the_nearest_rank() -> None:
    lengths = Counter(range(1, 101))

    assert quantiles(lengths) == {"min": 1, "p5": 5, "p50": 50, "p95": 95, "p99": 99, "max": 100}
    assert quantiles(Counter([7])) == {"min": 7, "p5": 7, "p50": 7, "p95": 7, "p99": 7, "max": 7}
    assert quantiles(Counter()) == {}


def test_a_histogram_has_every_range_between_its_ends() -> None:
    assert histogram(Counter([0, 1, 2, 3, 9, 9])) == [("0", 1), ("1-1", 1), ("2-3", 2), ("4-7", 0), ("8-15", 2)]
    assert histogram(Counter()) == []


@pytest.mark.parametrize(
    ("lines", "name"), [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**6, "1M<n<10M"), (10**12, "n>1T")]
)
def test_the_size_is_called_as_the_hub_calls_it(lines: int, name: str) -> None:
    assert size_category(lines) == name
