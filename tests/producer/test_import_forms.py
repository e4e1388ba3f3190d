"""Each form of file is recognised and read; rows in the shapes that other programs write today."""

from __future__ import annotations

import gzip
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftfleet.errors import DataError
from producer.import_data import forms
from producer.import_data.files import File, find, lines
from producer.import_data.forms import form_of, read
from producer.import_data.responses import Refused, Response
from producer.shapes import Malformed

ASKED = [{"role": "user", "content": "Name a prime."}]
CHOICE = {"finish_reason": "stop", "message": {"role": "assistant", "content": "7", "reasoning": "Small."}}

SPECFORGE = {
    "id": "x1",
    "model": "gpt-4",
    "conversations": [*ASKED, {"role": "assistant", "content": "7", "reasoning_content": "Small."}],
    "status": "success",
}
SPECULATORS = {
    "id": "conv-abc_gen0",
    "primary_id": "conv-abc",
    "input_ids": [5, 6, 7, 8, 2],
    "loss_mask": [0, 0, 0, 1, 1],
    "text": "...",
    "metadata": {"idx": 0, "finish_reason": "stop", "is_tool_call": False, "usage": {"completion_tokens": 2}},
}
SPECULATORS_BEFORE = {
    "id": "sample_0",
    "conversations": [{"from": "human", "value": "Name a prime."}, {"from": "gpt", "value": "7"}],
    "metadata": {"finish_reason": "stop", "usage": {"completion_tokens": 9}, "reasoning_content": "Small."},
}
DATATROVE = {
    "text": "Name a prime.",
    "id": "doc/0",
    "metadata": {
        "rollout_results": [
            {"text": "7", "finish_reason": "stop", "usage": {"completion_tokens": 9}, "reasoning": "Small."},
            {"text": "11", "finish_reason": "length", "usage": {"completion_tokens": 4}, "reasoning": ""},
        ]
    },
}

TAGGED = {"role": "assistant", "content": "<think>\nSmall.\n</think>\n\n7"}
WHOLE = [*ASKED, CHOICE["message"]]

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "specforge": (SPECFORGE, "specforge"),
    "speculators before its loss masks": (SPECULATORS_BEFORE, "conversations"),
    "messages": ({"messages": [*ASKED, TAGGED]}, "conversations"),
    "messages as text": ({"messages": json.dumps(WHOLE), "finish_reason": "stop"}, "conversations"),
    "a prompt and columns": ({"prompt": "Name a prime.", "content": "7", "reasoning": "Small."}, "responses"),
    "a prompt and a message": ({"prompt": "Name a prime.", "response": CHOICE["message"]}, "responses"),
    "a chat completion": ({"question": "Name a prime.", "response": {"choices": [CHOICE]}}, "responses"),
    "an answer beside the source's": (
        {"messages": [*ASKED, {"role": "assistant", "content": "2"}], "output": "7", "reasoning_content": "Small."},
        "responses",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_any_form_tells_what_was_asked_thought_and_answered(name: str) -> None:
    row, form = ROWS[name]

    [response] = read(row, None)

    assert form_of(row) == form
    assert isinstance(response, Response)
    assert response.asked is not None
    assert response.asked.messages == ASKED
    assert (response.reasoning, response.content) == ("Small.", "7")


def test_speculators_rows_are_their_ids_alone() -> None:
    [response] = read(SPECULATORS, None)

    assert form_of(SPECULATORS) == "speculators"
    assert isinstance(response, Response)
    assert (response.prompt_token_ids, response.token_ids) == ([5, 6, 7], [8, 2])
    assert (response.finish_reason, response.completion_tokens, response.asked) == ("stop", 2, None)


@pytest.mark.parametrize("key", ["rollout_results", "inference_results"])
@pytest.mark.parametrize("is_expanded", [False, True])
def test_each_rollout_of_a_datatrove_document_is_a_response(key: str, is_expanded: bool) -> None:
    rollouts = {key: DATATROVE["metadata"]["rollout_results"]}
    row = {**DATATROVE, **({"metadata": None} | rollouts if is_expanded else {"metadata": rollouts})}

    first, second = read(row, None)

    assert form_of(row) == "datatrove"
    assert isinstance(first, Response)
    assert isinstance(second, Response)
    assert (first.reasoning, first.content, first.finish_reason, first.completion_tokens) == ("Small.", "7", "stop", 9)
    assert (second.reasoning, second.content, second.finish_reason) == (None, "11", "length")
    assert first.asked is not None
    assert first.asked.messages == ASKED


def test_a_line_of_the_batch_api_is_named_by_its_custom_id() -> None:
    body = {"choices": [CHOICE | {"token_ids": [8, 2]}], "prompt_token_ids": [5], "usage": {"completion_tokens": 2}}

    [response] = read({"custom_id": "abc", "error": None, "response": {"status_code": 200, "body": body}}, None)

    assert isinstance(response, Response)
    assert (response.names, response.asked) == (("abc",), None)
    assert (response.prompt_token_ids, response.token_ids, response.completion_tokens) == ([5], [8, 2], 2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (SPECFORGE | {"status": "error", "error": "timeout"}, "status error"),
        (SPECFORGE | {"status": "skipped", "error": "empty"}, "status skipped"),
        ({"id": "conv-1", "metadata": {"error": "ConnectionError()"}}, "error"),
        (SPECULATORS_BEFORE | {"conversations": [ASKED[0]], "metadata": {"error": "x"}}, "error"),
        (DATATROVE | {"metadata": {"rollout_results": []}}, "no answer"),
        ({"messages": ASKED}, "no answer"),
        ({"prompt": "x", "response": "", "finish_reason": "stop"}, "no answer"),
        ({"prompt": "x", "response": "y", "finish_reason": "abort"}, "finish reason"),
        (SPECULATORS | {"loss_mask": [0, 1, 0, 1, 1]}, "several turns"),
    ],
)
def test_a_row_that_holds_no_answer_is_refused_with_its_reason(row: dict[str, Any], reason: str) -> None:
    [refused] = read(row, None)

    assert isinstance(refused, Refused)
    assert refused.reason == reason


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": 7, "response": "y"},
        {"prompt": "x", "response": 7},
        {"prompt": "x", "response": "y", "token_ids": [1, "2"]},
        {"prompt": "x", "response": "y", "tool_calls": [1]},
        {"messages": "[", "finish_reason": "stop"},
        {"messages": [*ASKED, {"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}]},
        SPECULATORS | {"loss_mask": [0, 1]},
        DATATROVE | {"metadata": {"rollout_results": [7]}},
        {"row_key": "a", "ids_source": "none", "outcome": "ok"},
        {"columns": "of no form"},
    ],
)
def test_a_row_in_a_wrong_shape_is_malformed(row: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read(row, None)


def test_the_thought_of_a_cut_answer_is_kept_though_there_is_no_content() -> None:
    answer = {"role": "assistant", "content": None, "reasoning_content": "Let me"}

    [response] = read({"messages": [*ASKED, answer], "finish_reason": "length"}, None)

    assert isinstance(response, Response)
    assert (response.reasoning, response.content, response.finish_reason) == ("Let me", None, "length")


def test_an_unknown_form_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"--format xml: known are samples, datatrove, speculators, specforge"):
        forms.check("xml")


ROW = {"prompt": "Is U+2028 \u2028 a line? 字", "response": "No."}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_files_of_every_kind_give_their_rows_with_numbers(tmp_path: Path, suffix: str) -> None:
    path, raw = tmp_path / f"data{suffix}", (json.dumps(ROW, ensure_ascii=False) + "\n").encode()
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([ROW, ROW]), path)
    else:
        pack = {".gz": gzip.compress, ".zst": partial(pa.compress, codec="zstd", asbytes=True)}.get(path.suffix, bytes)
        path.write_bytes(pack(raw) + pack(raw))  # as two runs that append to one file
    read_bytes: list[int] = []

    found = list(lines(file_of(path), read_bytes.append))

    assert [(line.number, line.row) for line in found] == [(1, ROW), (2, ROW)]
    assert sum(read_bytes) == path.stat().st_size


def test_a_bad_line_and_a_file_that_breaks_off_cost_only_themselves(tmp_path: Path) -> None:
    good = (json.dumps(ROW) + "\n").encode()
    whole = gzip.compress(good + b'{"prompt": NaN}\n\xff\n[1]\n' + good)
    (tmp_path / "data.jsonl.gz").write_bytes(whole + gzip.compress(good)[:-9])

    found = [line.row for line in lines(file_of(tmp_path / "data.jsonl.gz"), lambda _: None)]

    kinds = [type(row) for row in found]
    assert kinds[:5] == [dict, Malformed, Malformed, Malformed, dict]
    assert kinds[-1] is Malformed
    assert "cannot be read from here on" in str(found[-1])


def test_a_folder_stands_for_the_files_in_it_and_a_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    for name in ("out/00000.jsonl", "out/sub/00001.jsonl", "out/stats.json", "out/.tmp.jsonl"):
        (tmp_path / name).write_text("{}\n")

    found = find([str(tmp_path / "out"), str(tmp_path / "out/00000.jsonl")])

    assert [file.name for file in found] == ["00000.jsonl", "sub/00001.jsonl"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("gone.jsonl", "is not there"), ("x.json", "not a kind"), ("empty", "holds no"), ("", "no file is named")],
)
def test_what_cannot_be_read_is_told_with_what_can(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "empty").mkdir()

    with pytest.raises(DataError, match=rf"{said}.*\.jsonl\.zst"):
        find([str(tmp_path / name)] if name else [])


def file_of(path: Path) -> File:
    return File(path, path.name, path.stat().st_size)


def documented() -> list[tuple[str, dict[str, Any]]]:
    """The rows that the page shows, each with the form under which it shows it."""
    page = (Path(__file__).parents[2] / "docs" / "import-data.md").read_text()
    return [(form, json.loads(row)) for form, row in re.findall(r"^```json (\w+)\n(.*?)\n```$", page, re.M)]


@pytest.mark.parametrize(("form", "row"), documented())
def test_the_page_shows_rows_that_are_read_as_it_says(form: str, row: dict[str, Any]) -> None:
    [response] = read(row, None)

    assert form_of(row) == form
    assert isinstance(response, Response)
    if form != "speculators":
        assert (response.reasoning, response.content) == ("Small.", "7")


def test_the_page_shows_every_form() -> None:
    assert {form for form, _ in documented()} == set(forms.FORMS) - {"samples", "errors"}
