"""Every line is a prompt or is counted, and what is wrong with the data set as a whole is an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftfleet.errors import DataError
from draftfleet.settings import Producer
from producer.reading import NAMED, PATIENCE_LINES, Reading
from producer.sources import open_source

WriteJsonl = Callable[..., Path]
Knobs = Callable[..., Producer]


def reading(knobs: Producer) -> Reading:
    return Reading(open_source(knobs), knobs)


MIXED: list[Any] = [
    {"prompt": "Why?"},
    {"messages": ["Why?"]},
    {"prompt": ""},
    {"messages": [{"role": "narrator", "content": "Once"}]},
    {"other": 1},
    [],
    {"prompt": "Why not?"},
]


def test_every_line_is_a_prompt_or_counted(knobs: Knobs, write_jsonl: WriteJsonl) -> None:
    read = reading(knobs(write_jsonl(MIXED)))

    prompts = list(read)

    assert [prompt.messages[0]["content"] for prompt in prompts] == ["Why?", "Why not?"]
    assert (read.lines, read.malformed) == (7, 3)
    assert read.rejected == {"empty prompt": 1, "unknown role": 1}


def test_the_first_bad_lines_are_named_and_the_others_counted(
    knobs: Knobs, write_jsonl: WriteJsonl, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "Why?"}, *({"prompt": number} for number in range(NAMED + 5))]
    read = reading(knobs(write_jsonl(rows)))

    with caplog.at_level(logging.WARNING):
        assert len(list(read)) == 1

    named = [message for message in caplog.messages if message.startswith("line malformed")]
    assert len(named) == NAMED
    assert 'line=2 why="prompt is a number, neither a text nor a list of messages"' in named[0]
    assert read.malformed == NAMED + 5


def test_strict_stops_at_the_first_malformed_line_and_names_it(knobs: Knobs, write_jsonl: WriteJsonl) -> None:
    read = iter(reading(knobs(write_jsonl(MIXED), strict=True)))

    assert next(read).messages[0]["content"] == "Why?"
    with pytest.raises(DataError, match=r"line 2: message 1 is a text, not an object.*producer\.strict"):
        next(read)


def test_an_unknown_column_lists_those_that_are_there(knobs: Knobs, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    rows = [{"text": "Why?", "score": number} for number in range(PATIENCE_LINES)]
    parquet = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)

    for path in (write_jsonl(rows), parquet):
        with pytest.raises(DataError, match=r"none of the columns messages.*there: text, score.*producer\.column"):
            list(reading(knobs(path)))
        with pytest.raises(DataError, match=r"no column txt\. Columns that are there: text, score"):
            list(reading(knobs(path, column="txt")))
        with pytest.raises(DataError, match=r"no column part\. Columns that are there: text, score"):
            list(reading(knobs(path, column="text", split_column="part")))
        assert len(list(reading(knobs(path, column="text")))) == PATIENCE_LINES


@pytest.mark.parametrize("strict", [False, True])
def test_an_unknown_column_is_said_at_once_with_the_nearest_and_no_line_is_blamed(
    knobs: Knobs, write_jsonl: WriteJsonl, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    data = write_jsonl([*[{"messages": "Why?"}] * 20, *[{"prompt": "Why?"}] * 20])

    with pytest.raises(DataError, match=r"no column mesages\. .* there: messages, prompt\. Did you mean messages\?"):
        list(reading(knobs(data, column="mesages", strict=strict)))

    assert caplog.messages == []


def test_a_column_that_is_null_in_every_row_is_not_said_to_be_missing(
    knobs: Knobs, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    rows = [{"prompt": None, "other": 1}] * 3
    parquet = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)

    for path in (write_jsonl(rows), parquet):
        for column in ("prompt", None):
            with pytest.raises(
                DataError, match=r"each of 3 rows lacks a column, or holds null in it.*line 1: it has no"
            ):
                list(reading(knobs(path, column=column)))


@pytest.mark.parametrize("place", [0, 1, PATIENCE_LINES - 1])
def test_a_column_that_some_lines_lack_costs_only_those(
    knobs: Knobs, write_jsonl: WriteJsonl, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    rows: list[Any] = [{"other": number} for number in range(PATIENCE_LINES + 5)]
    read = reading(knobs(write_jsonl([*rows[:place], {"prompt": "Why?"}, *rows[place:]])))

    assert len(list(read)) == 1
    assert read.malformed == PATIENCE_LINES + 5
    assert len([message for message in caplog.messages if message.startswith("line malformed")]) == NAMED


def test_strict_names_the_first_line_that_lacks_the_column_once_another_has_it(
    knobs: Knobs, write_jsonl: WriteJsonl
) -> None:
    data = write_jsonl([{"other": 1}, {"other": 2}, {"prompt": "Why?"}])

    with pytest.raises(DataError, match=r"line 1: it has none of messages.*producer\.strict"):
        list(reading(knobs(data, strict=True)))


def test_an_empty_file_is_an_error(knobs: Knobs, tmp_path: Path) -> None:
    for text in ("", "\n\n"):
        (tmp_path / "data.jsonl").write_text(text)
        with pytest.raises(DataError, match="is empty"):
            list(reading(knobs(tmp_path / "data.jsonl")))


def test_the_limit_is_in_lines(knobs: Knobs, write_jsonl: WriteJsonl) -> None:
    read = reading(knobs(write_jsonl(MIXED), limit=3))

    assert len(list(read)) == 1
    assert read.lines == 3
