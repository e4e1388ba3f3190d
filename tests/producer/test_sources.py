"""Files and data sets as streams of numbered rows; a bad line costs itself, a bad file says what it is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftfleet.errors import DataError
from draftfleet.settings import Producer
from producer.prompts import Malformed
from producer.sources import Line, open_source

Knobs = Callable[..., Producer]
WriteJsonl = Callable[..., Path]

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"Frage {number} über Öl"}], "score": number} for number in range(3)
]


def lines(knobs: Producer) -> list[Line]:
    return list(open_source(knobs).lines({"messages", "prompt"}))


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def faults(knobs: Producer) -> dict[int, str]:
    return {line.number: str(line.row) for line in lines(knobs) if isinstance(line.row, Malformed)}


def test_json_lines_parquet_and_a_folder_give_the_same_messages(
    knobs: Knobs, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    plain = write_jsonl(ROWS)
    packed = write(tmp_path / "data.jsonl.gz", gzip.compress(plain.read_bytes()))
    columns = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), columns)
    (tmp_path / "folder").mkdir()
    folder = plain.rename(tmp_path / "folder" / "train.jsonl").parent
    plain = write_jsonl(ROWS)

    for path in (plain, packed, columns, folder):
        read = lines(knobs(path))
        assert [line.number for line in read] == [1, 2, 3], path
        assert [dict(line.row)["messages"] for line in read if not isinstance(line.row, Malformed)] == [
            row["messages"] for row in ROWS
        ]


def test_columns_that_are_not_wanted_are_not_read_from_parquet(knobs: Knobs, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet")

    assert all(set(dict(line.row)) == {"messages"} for line in lines(knobs(tmp_path / "data.parquet")))  # type: ignore[arg-type]


def test_bad_lines_are_named_by_number_and_the_rest_is_read(knobs: Knobs, tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"\n[1]\n{"prompt": "\xff"}\n{"prompt": NaN}\n{"prompt": "c"}'
    path = write(tmp_path / "data.jsonl", text + b"\n" + b'{"prompt": ' + b"[" * 100_000 + b"\n")

    assert [line.number for line in lines(knobs(path))] == [1, 3, 4, 5, 6, 7, 8]
    found = faults(knobs(path))
    assert list(found) == [3, 4, 5, 6, 8]
    assert found[3] == "not JSON: Expecting ',' delimiter at position 15"
    assert found[4] == "a list, not an object"
    assert found[5] == "not UTF-8: byte 0xff at position 13"
    assert found[6] == "not JSON: NaN is no JSON number"
    assert found[8].startswith("not JSON: ")


def test_a_bad_text_in_parquet_costs_only_its_row(knobs: Knobs, tmp_path: Path) -> None:
    texts = pa.array([b"good", b"bad \xff", b"good too"]).cast(pa.binary())
    column = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    pq.write_table(pa.table({"prompt": column}), tmp_path / "data.parquet")

    assert faults(knobs(tmp_path / "data.parquet")) == {2: "not UTF-8: byte 0xff at position 5"}
    assert [line.number for line in lines(knobs(tmp_path / "data.parquet"))] == [1, 2, 3]


def test_a_missing_file_is_answered_with_the_near_names(knobs: Knobs, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    write_jsonl(ROWS, "questions.jsonl")
    write_jsonl(ROWS, "zebra.jsonl")

    with pytest.raises(DataError, match=r"question\.jsonl is not there \(in .* there are questions\.jsonl\)"):
        open_source(knobs(tmp_path / "question.jsonl"))
    with pytest.raises(DataError, match="nor is its folder"):
        open_source(knobs(tmp_path / "nowhere" / "question.jsonl"))


def test_a_name_that_is_neither_file_nor_data_set_says_so(knobs: Knobs, write_jsonl: WriteJsonl) -> None:
    write_jsonl(ROWS, "questions.jsonl")

    with pytest.raises(
        DataError, match=r"neither a file \(in .*questions\.jsonl\) nor a data set that could be opened"
    ):
        open_source(knobs("question"))


def test_a_split_that_a_folder_has_not_says_so(knobs: Knobs, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write_jsonl(ROWS, "folder/train.jsonl")

    with pytest.raises(DataError, match=r"split elsewhere.*producer\.split"):
        open_source(knobs(tmp_path / "folder", split="elsewhere"))


def test_a_file_of_an_unknown_kind_lists_the_known_ones(knobs: Knobs, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"known are JSON Lines \(\.jsonl\), JSON \(\.json\), CSV .* and \.parquet"):
        open_source(knobs(write(tmp_path / "data.xlsx", b"PK")))


@pytest.mark.parametrize(
    ("name", "data", "wrong"),
    [
        ("data.jsonl.gz", b'{"prompt": "a"}\n', r"not gzip by its first bytes.*ends in \.jsonl"),
        ("data.jsonl", gzip.compress(b'{"prompt": "a"}\n'), r"is gzip by its first bytes.*ends in \.jsonl\.gz"),
        ("data.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n') + b"tail", "cannot be read after line 1"),
        ("data.jsonl.gz", gzip.compress(json.dumps(ROWS).encode() * 9)[:-9], "cannot be read after line 0"),
        ("data.parquet", b'{"prompt": "a"}\n', "not a Parquet file"),
        ("data.parquet", b"", "not a Parquet file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_an_error(
    knobs: Knobs, tmp_path: Path, name: str, data: bytes, wrong: str
) -> None:
    with pytest.raises(DataError, match=wrong):
        lines(knobs(write(tmp_path / name, data)))


def test_the_position_reaches_the_size(knobs: Knobs, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    path = write_jsonl(ROWS)
    packed = write(tmp_path / "data.jsonl.gz", gzip.compress(path.read_bytes()))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet")

    for source in map(open_source, map(knobs, (path, packed, tmp_path / "data.parquet"))):
        assert len(list(source.lines({"messages"}))) == len(ROWS)
        assert source.position == source.size


def test_provenance_names_the_file_by_its_content(knobs: Knobs, write_jsonl: WriteJsonl) -> None:
    one, other = (open_source(knobs(write_jsonl(ROWS, name))).provenance for name in ("one.jsonl", "other.jsonl"))

    assert one["sha256"] == other["sha256"]
    assert one["path"] != other["path"]
    assert one["size_bytes"] > 0
