"""Files of every kind, packed or not, one or many: the same rows, and a clear word on what is broken."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from draftfleet.errors import DataError
from draftfleet.settings import Producer
from producer.reading import Reading
from producer.shapes import Malformed
from producer.sources import Line, open_source
from producer.sources.json_array import CHUNK_BYTES

Knobs = Callable[..., Producer]
ROWS: list[dict[str, Any]] = [{"question": f"Why {number}, “so”?\nSay;", "other": number} for number in range(5)]
QUESTIONS = [row["question"] for row in ROWS]


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def lines(knobs: Producer) -> list[Line]:
    return list(open_source(knobs).lines({"question", "messages", "prompt"}))


def questions(knobs: Producer) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in Reading(open_source(knobs), knobs)]


KINDS = {
    "data.jsonl": as_lines(ROWS),
    "data.ndjson": as_lines(ROWS),
    "data.jsonl.gz": gzip.compress(as_lines(ROWS)),
    "data.jsonl.zst": as_zst(as_lines(ROWS)) + as_zst(b""),
    "data.json": json.dumps(ROWS, indent=2).encode(),
    "compact.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS, ensure_ascii=False).encode(),
    "lines.json": b"\n" + as_lines(ROWS),
    "data.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "data.csv": as_csv(ROWS),
    "semicolons.csv": b"\xef\xbb\xbf" + as_csv(ROWS, ";"),
    "data.tsv": as_csv(ROWS, "\t"),
    "data.csv.gz": gzip.compress(as_csv(ROWS)),
    "data.csv.zst": as_zst(as_csv(ROWS)),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_questions(knobs: Knobs, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, KINDS[name])

    assert questions(knobs(path)) == QUESTIONS
    source = open_source(knobs(path))
    assert len(list(source.lines({"question"}))) == 5
    assert source.position == source.size


def test_a_pattern_a_folder_and_a_list_are_read_file_by_file_in_order(knobs: Knobs, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), tmp_path / "a.parquet")
    write(tmp_path / "b" / "1.jsonl", as_lines(ROWS[2:4]))
    write(tmp_path / "c.csv", as_csv(ROWS[4:]))
    write(tmp_path / ".hidden.jsonl", b"no")
    write(tmp_path / "_temporary" / "x.jsonl", b"no")
    write(tmp_path / "notes.txt", b"no")

    assert questions(knobs(tmp_path)) == QUESTIONS
    assert questions(knobs(tmp_path / "**" / "*.[jpc]*")) == QUESTIONS
    named = [tmp_path / "c.csv", tmp_path / "b", tmp_path / "a.parquet"]
    producer = Producer(data=[str(path) for path in named])
    assert questions(producer) == [*QUESTIONS[4:], *QUESTIONS[2:4], *QUESTIONS[:2]]

    source = open_source(producer)
    assert [(Path(line.file).name, line.number) for line in source.lines({"question"})] == [
        ("c.csv", 2),
        ("1.jsonl", 1),
        ("1.jsonl", 2),
        ("a.parquet", 1),
        ("a.parquet", 2),
    ]
    assert source.position == source.size


def test_the_content_of_several_files_tells_whether_they_are_the_same(knobs: Knobs, tmp_path: Path) -> None:
    def digest() -> str | None:
        return open_source(knobs(tmp_path / "*.jsonl")).digest

    write(tmp_path / "a.jsonl", as_lines(ROWS[:2]))
    write(tmp_path / "b.jsonl", as_lines(ROWS[2:]))
    first = digest()
    assert first is not None
    assert digest() == first

    write(tmp_path / "b.jsonl", as_lines(ROWS[3:]))
    assert digest() != first


def test_a_split_of_a_folder_is_told_by_the_names_in_it(knobs: Knobs, tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00001.jsonl", as_lines(ROWS[:3]))
    write(tmp_path / "val" / "0.jsonl", as_lines(ROWS[3:]))

    assert questions(knobs(tmp_path)) == QUESTIONS[:3]
    assert questions(knobs(tmp_path, split="validation")) == QUESTIONS[3:]
    with pytest.raises(DataError, match=r"has no split test; there are train, validation\. Set producer\.split"):
        open_source(knobs(tmp_path, split="test"))


def test_a_folder_that_datasets_saved_is_read_with_its_splits(knobs: Knobs, tmp_path: Path) -> None:
    whole = Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    DatasetDict({"train": whole.select(range(2)), "test": whole.select([4])}).save_to_disk(tmp_path / "two")

    assert questions(knobs(tmp_path / "one")) == QUESTIONS
    assert questions(knobs(tmp_path / "two")) == QUESTIONS[:2]
    assert questions(knobs(tmp_path / "two", split="test")) == QUESTIONS[4:]
    with pytest.raises(DataError, match=r"has no split dev; there are train, test\."):
        open_source(knobs(tmp_path / "two", split="dev"))


def test_a_pattern_that_finds_nothing_says_what_is_there(knobs: Knobs, tmp_path: Path) -> None:
    write(tmp_path / "chats.jsonl", as_lines(ROWS))

    with pytest.raises(DataError, match=r"\*\.json: no file is named so \(in .* there are chats\.jsonl\)\. Correct"):
        open_source(knobs(tmp_path / "*.json"))
    with pytest.raises(DataError, match=r"no file is named so, and there is no folder .*nowhere"):
        open_source(knobs(tmp_path / "nowhere" / "*.json"))
    write(tmp_path / "notes.txt", b"no")
    with pytest.raises(DataError, match=r"notes\.txt is not a kind of file that is read.*Make the pattern narrower"):
        open_source(knobs(tmp_path / "*"))


def test_a_folder_without_a_file_that_is_read_says_so(knobs: Knobs, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder holds no file that is read; known are JSON Lines"):
        open_source(knobs(tmp_path))


def test_one_of_several_that_is_no_file_says_how_data_sets_are_mixed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", as_lines(ROWS))

    with pytest.raises(DataError, match=r"names 2 places, and some/name is no file.*\[\[producer\.sources\]\]"):
        open_source(Producer(data=[str(path), "some/name"]))


BAD_FILES: dict[str, tuple[bytes, list[int], dict[int, str]]] = {
    "data.csv": (
        b'prompt,n\r\ngood,1\r\n\r\n"two\r\nlines",2\r\nbad \xff,3\r\ntoo,many,4\r\n,5\r\nlast,6\r\n',
        [2, 4, 6, 7, 8, 9],
        {6: "not UTF-8: byte 0xff in prompt", 7: "3 fields where the header has 2"},
    ),
    "data.json": (
        b'[{"prompt": "a"}, 7, {"prompt": NaN}, ["x"], {"prompt": "\xc3\xa4"}, {"prompt": "}"}]',
        [1, 2, 3, 4, 5, 6],
        {2: "a number, not an object", 3: "not JSON: NaN is no JSON number", 4: "a list, not an object"},
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_row_costs_none_of_its_neighbours(knobs: Knobs, tmp_path: Path, name: str) -> None:
    data, numbers, faults = BAD_FILES[name]

    read = lines(knobs(write(tmp_path / name, data)))

    assert [line.number for line in read] == numbers
    assert {line.number: str(line.row) for line in read if isinstance(line.row, Malformed)} == faults


@pytest.mark.parametrize(
    ("name", "data", "wrong"),
    [
        ("data.json", b'[{"prompt": "a"}, {"prompt": "b"', r"broken at object 2: "),
        ("data.json", b'[{"prompt": "a"}', r"broken at object 1: the file ends after it"),
        ("data.json", b'[{"prompt": "a"} {"prompt": "b"}]', r"broken at object 1: no comma and no \] after it"),
        ("data.json", b'[{"prompt": "a"}, {prompt}' + b" " * (CHUNK_BYTES * 3), r"broken at object 2: Expecting"),
        ("data.json", b"[" * 200_000, r"broken at object 1: nested too deeply"),
        ("data.csv", b'prompt,n\r\na,1\r\n"b,2\r\nc,3', r"begins on line 3 is no CSV: unexpected end of data"),
        ("data.csv", b'prompt,n\r\n"a" b,1\r\n', r"begins on line 2 is no CSV: "),
        ("data.jsonl.zst", as_zst(as_lines(ROWS))[:-9], r"cannot be read after line"),
        ("data.jsonl.zst", as_lines(ROWS), r"is not zstd by its first bytes: give it a name that ends in \.jsonl\."),
        ("data.csv", as_zst(b"a"), r"is zstd by its first bytes: give it a name that ends in \.csv\.zst\."),
    ],
)
def test_a_file_that_is_broken_is_an_error_that_says_where(
    knobs: Knobs, tmp_path: Path, name: str, data: bytes, wrong: str
) -> None:
    with pytest.raises(DataError, match=wrong):
        lines(knobs(write(tmp_path / name, data)))


def test_objects_of_an_array_are_found_wherever_a_chunk_ends(knobs: Knobs, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} \\u00e4 ä " + "x" * (CHUNK_BYTES * number // 7)} for number in range(20)]

    read = lines(knobs(write(tmp_path / "data.json", json.dumps(rows, ensure_ascii=False).encode())))

    assert [line.row for line in read] == rows


def test_an_array_is_read_in_bounded_memory(knobs: Knobs, tmp_path: Path) -> None:
    row = json.dumps({"prompt": "x" * 1000}).encode()
    path = write(tmp_path / "data.json", b"[" + b",".join([row] * 40_000) + b"]")
    source = open_source(knobs(path))

    tracemalloc.start()
    num_read = sum(1 for _ in source.lines({"prompt"}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert num_read == 40_000
    assert path.stat().st_size > 40e6
    assert peak < 12 * CHUNK_BYTES


def test_images_beside_the_texts_of_parquet_are_refused_row_by_row(knobs: Knobs, tmp_path: Path) -> None:
    rows = [
        {"question": "What is this?", "image": {"bytes": b"\x89PNG", "path": None}},
        {"question": "And this?", "image": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    producer = knobs(tmp_path / "data.parquet")
    reading = Reading(open_source(producer), producer)

    assert [prompt.messages[0]["content"] for prompt in reading] == ["And this?"]
    assert reading.rejected == {"image": 1}


@pytest.fixture
def mixed_arguments() -> list[dict[str, Any]]:
    """Arguments as a text and as an object, which no one Arrow column holds."""

    def row(arguments: object) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
        turns = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "seen"},
        ]
        return {"messages": turns, "tools": [[]]}

    return [row('{"at": "it"}'), row({"at": "it"})] * 600


def test_arguments_of_mixed_kinds_and_empty_tools_lose_no_row(
    knobs: Knobs, tmp_path: Path, mixed_arguments: list[dict[str, Any]]
) -> None:
    producer = knobs(write(tmp_path / "data.jsonl", as_lines(mixed_arguments)))
    prompts = list(Reading(open_source(producer), producer))

    assert len(prompts) == 1200
    assert {prompt.messages[1]["tool_calls"][0]["function"]["arguments"] for prompt in prompts} == {'{"at": "it"}'}
    assert {prompt.tools for prompt in prompts} == {None}
