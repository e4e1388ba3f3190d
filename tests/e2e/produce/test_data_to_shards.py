"""A data set becomes shards, references and a sealed run, and producing again adds only what is new."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import redis

from draftfleet.accounting import Accountant
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from producer.produce import produce

Until = Callable[..., Any]
Configure = Callable[..., Settings]
InThread = Callable[[Callable[[], Any]], Future[Any]]
Questions = Callable[..., list[str]]
Write = Callable[[Path, list[str]], Path]
Contents = Callable[[Run], Counter[str]]
Texts = Callable[[list[str]], Counter[str]]
Queued = Callable[[redis.Redis], list[str]]
MODEL = "tiny"
TARGET = Path(__file__).parents[3] / "examples" / "tiny-target"


def test_a_data_set_becomes_shards_references_and_a_sealed_run(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    questions: Questions,
    contents: Contents,
    texts: Texts,
    queued: Queued,
) -> None:
    good = questions(100)
    bad = ["{\n", '{"prompt": 7}\n', '{"prompt": ""}\n']
    data = tmp_path / "data.jsonl.gz"
    data.write_bytes(gzip.compress("".join([*good[:50], *bad, "\n", *good[40:]]).encode()))

    report = produce(configure(data), progress=False)

    run = Run.open(storage, "run")
    assert contents(run) == texts(good)
    assert sorted(queued(client)) == run.batches()
    assert (report.lines, report.prompts, report.new, report.already) == (113, 100, 100, 0)
    assert (report.duplicates, report.malformed, report.rejected) == (10, 2, 1)
    assert report.rejected_for == {"empty prompt": 1}
    assert report.train + report.heldout == report.run_prompts == 100
    assert 0 < report.heldout < 50
    assert report.batches == len(run.batches())
    assert json.loads(report.to_json())["run_id"] == run.run_id
    assert (Accountant(run).account().expected, Accountant(run).account().pending) == (100, 100)


def test_run_json_pins_what_is_asked_and_says_where_it_came_from(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(3))

    produce(configure(data, target__path=str(TARGET), sampling__temperature=0.7), progress=False)

    info = Run.open(storage, "run").info
    assert info.content["target.model"] == MODEL
    assert len(info.content["target.fingerprint"]) == 32
    assert info.content["sampling.temperature"] == 0.7
    assert info.content["producer.batch_size"] == 8
    assert not [key for key in info.content if key.startswith(("storage", "queue", "worker", "producer.data"))]
    assert info.provenance["data.source"]["path"] == str(data)
    assert len(info.provenance["data.source"]["sha256"]) == 64


def test_the_first_batch_is_in_the_queue_while_the_data_set_is_still_being_written(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    until: Until,
    in_thread: InThread,
    questions: Questions,
    write: Write,
    contents: Contents,
    texts: Texts,
    queued: Queued,
) -> None:
    pipe = tmp_path / "data.jsonl"
    os.mkfifo(pipe)
    lines = questions(30)
    produce(configure(write(tmp_path / "earlier.jsonl", lines[:1])), progress=False)
    assert Run.open(storage, "run").sealed() is not None
    producing = in_thread(lambda: produce(configure(pipe), progress=False))

    with pipe.open("w") as file:
        file.writelines(lines[:20])
        file.flush()
        until(lambda: len(queued(client)) > 1, what="the first batch in the queue")
        assert not producing.done()
        assert Run.open(storage, "run").sealed() is None
        file.writelines(lines[20:])

    assert producing.result(60).new == 29
    assert Run.open(storage, "run").sealed() is not None
    assert contents(Run.open(storage, "run")) == texts(lines)


def test_producing_again_adds_only_what_is_new_and_numbers_go_on(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    questions: Questions,
    write: Write,
    contents: Contents,
    texts: Texts,
    queued: Queued,
) -> None:
    first, all_of_it = questions(50), questions(80)
    produce(configure(write(tmp_path / "first.jsonl", first)), progress=False)
    run = Run.open(storage, "run")
    before = {batch: run.read_prompts(batch) for batch in run.batches()}

    report = produce(configure(write(tmp_path / "second.jsonl", all_of_it[::-1])), progress=False)
    again = produce(configure(tmp_path / "second.jsonl"), progress=False)

    assert (report.prompts, report.new, report.already, report.run_prompts) == (80, 30, 50, 80)
    assert (again.new, again.already, again.batches) == (0, 80, 0)
    assert {batch: run.read_prompts(batch) for batch in before} == before
    assert contents(run) == texts(all_of_it)
    assert sorted(queued(client)) == run.batches()
    assert Accountant(run).account().expected == 80


def test_a_column_splits_and_the_overlap_of_the_two_sides_is_counted(
    configure: Configure, tmp_path: Path, write: Write
) -> None:
    rows = [
        {"question": "How tall is a giraffe?", "split": "train"},
        {"question": "How tall is a horse?", "split": "train"},
        {"question": "how tall is a  GIRAFFE", "split": "test"},
        {"question": "How tall is a giraffe ?!", "split": "test"},
        {"question": "How tall is a mouse?", "split": "test"},
    ]
    lines = [json.dumps(row) + "\n" for row in rows]

    report = produce(configure(write(tmp_path / "data.jsonl", lines)), progress=False)

    assert (report.train, report.heldout, report.overlap) == (2, 3, 2)
    assert produce(configure(tmp_path / "data.jsonl"), progress=False).overlap == 2


def test_texts_with_every_kind_of_line_break_survive_the_shard(
    configure: Configure, storage: FileStorage, tmp_path: Path, write: Write, contents: Contents
) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\r\ng\x1eh"

    produce(configure(write(tmp_path / "data.jsonl", [json.dumps({"prompt": text}) + "\n"])), progress=False)

    assert contents(Run.open(storage, "run")) == {text: 1}


def test_a_mixture_is_told_source_by_source_and_recognised_when_it_is_produced_again(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    write(tmp_path / "easy.jsonl", [*questions(30), *questions(2), "{\n"])
    write(tmp_path / "hard.jsonl", [*questions(3), *(line.replace("times", "minus") for line in questions(20))])
    sources = [{"data": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in ("easy", "hard")]
    settings = configure("", producer__sources=sources, producer__until="all")

    report = produce(settings, progress=False)
    again = produce(settings, progress=False)

    asked = [
        prompt
        for batch in Run.open(storage, "run").batches()
        for prompt in Run.open(storage, "run").read_prompts(batch)
    ]
    assert Counter(prompt.source for prompt in asked) == {"easy": 30, "hard": 20}
    assert (report.lines, report.prompts, report.duplicates, report.malformed) == (56, 50, 5, 1)
    told = [
        {key: one[key] for key in ("name", "lines", "prompts", "new", "duplicates", "malformed", "ended")}
        for one in report.sources
    ]
    assert told == [
        {"name": "easy", "lines": 33, "prompts": 30, "new": 30, "duplicates": 2, "malformed": 1, "ended": True},
        {"name": "hard", "lines": 23, "prompts": 20, "new": 20, "duplicates": 3, "malformed": 0, "ended": True},
    ]
    assert (again.already_read, again.new, again.already) == (True, 0, 50)
    assert [(one["new"], one["already"]) for one in again.sources] == [(0, 30), (0, 20)]


def test_a_larger_sample_of_the_same_seed_adds_only_what_is_new(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(200))

    first = produce(configure(data, producer__sample=20), progress=False)
    second = produce(configure(data, producer__sample=50), progress=False)

    assert (first.new, first.rejected_for) == (20, {"not in the sample": 180})
    assert (second.new, second.already, second.run_prompts) == (30, 20, 50)
