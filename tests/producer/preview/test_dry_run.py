"""A dry run tells what `produce` would find, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftfleet.errors import DataError, SettingsError
from draftfleet.settings import Settings, load
from producer.preview import first_prompts
from producer.preview.dry_run import dry_run, show
from producer.preview.rendered import render
from producer.produce import produce

Configure = Callable[..., Settings]
WriteJsonl = Callable[..., Path]

TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a prime."},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "A larger one."},
]
MIXED: list[Any] = [
    {"messages": [*TURNS, {"role": "assistant", "content": "11"}]},
    {"prompt": "Which day is it?", "tools": [{"type": "function", "function": {"name": "today"}}]},
    {"prompt": "Which day is it?", "tools": [{"type": "function", "function": {"name": "today"}}]},
    {"prompt": ""},
    {"prompt": 3},
    {"messages": [{"role": "narrator", "content": "Once"}]},
    *({"prompt": f"What is {number} times {number}?"} for number in range(200)),
    {"prompt": "A larger one!", "split": "test"},
]


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_it_counts_what_produce_then_counts_and_what_is_there_afterwards(
    settings: Settings, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    data = write_jsonl(MIXED)
    here = load(
        flags={
            "queue.url": settings.queue.url.get_secret_value() if settings.queue.url else "",
            "storage.url": settings.storage.url,
            "target.model": settings.model,
            "producer.data": str(data),
            "producer.heldout": 0.2,
        }
    )
    before = dry_run(here).survey

    report = produce(here, progress=False)
    written = files(tmp_path / "storage")
    after = dry_run(here).survey

    names = (
        "lines", "prompts", "new", "already", "duplicates", "malformed", "rejected", "rejected_for", "train",
        "heldout", "overlap",
    )  # fmt: skip
    assert {name: getattr(before, name) for name in names} == {name: getattr(report, name) for name in names}
    assert (before.overlap, before.duplicates, before.malformed, before.rejected) == (1, 1, 1, 2)
    assert (after.new, after.already, after.overlap, after.answers) == (0, report.new, 1, 0)
    assert files(tmp_path / "storage") == written


def test_the_command_writes_no_file_asks_no_redis_and_prints_one_line(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    data = write_jsonl(MIXED)
    there = files(tmp_path)
    command = [sys.executable, "-m", "draftfleet", "produce", str(data), "--model", "m", "--dry-run", "--json"]
    knobs = ["--show", "1", "--mean-tokens", "100", "--tokens-per-second", "50", "--num-servers", "2"]

    result = subprocess.run(
        [*command, *knobs, "--set", "storage.url=storage"],
        cwd=tmp_path,
        env=os.environ | {"DRAFTFLEET_QUEUE__URL": "redis://127.0.0.1:1/0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    found = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert files(tmp_path) == there
    assert (found["dry_run"], found["survey"]["prompts"], len(found["shown"])) == (True, 203, 1)
    assert found["work"]["tokens"] == 203 * 100
    assert found["work"]["hours"] == [
        {"tokens_per_s": 50.0, "server_hours": 20300 / 50 / 3600, "hours": 20300 / 50 / 3600 / 2}
    ]


def test_each_kind_of_fault_has_its_first_line_as_an_example(configure: Configure, write_jsonl: WriteJsonl) -> None:
    found = dry_run(configure(write_jsonl(MIXED))).survey

    assert found.rejected_for == {"empty prompt": 1, "unknown role": 1}
    assert list(found.examples) == ["empty prompt", "malformed", "unknown role"]
    assert found.examples["malformed"].startswith("line 5: prompt is a number")
    assert found.examples["empty prompt"].startswith("line 4: ")


def test_it_counts_turns_tools_and_the_answers_that_are_asked(configure: Configure, write_jsonl: WriteJsonl) -> None:
    data = write_jsonl(MIXED)

    last, every = (dry_run(configure(data, producer__turns=turns)).survey for turns in ("last", "all"))

    assert last.turns == {1: 202, 2: 1}
    assert (last.with_system, last.with_tools, last.with_tool_calls) == (1, 1, 0)
    assert (last.answers, every.answers) == (203, 204)


def test_each_source_of_a_mixture_is_counted_for_itself(
    configure: Configure, write_jsonl: WriteJsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    short = write_jsonl(
        [*({"prompt": f"{number}?"} for number in range(8)), {"prompt": "0?"}, {"prompt": 3}], "short.jsonl"
    )
    long = write_jsonl(
        [{"prompt": f"What is {number} times {number + 1}, please?"} for number in range(90)], "long.jsonl"
    )
    sources = [{"data": str(short), "weight": 1, "heldout": 1.0}, {"data": str(long), "weight": 2, "heldout": 0.0}]
    settings = configure("", producer__sources=sources)

    found = dry_run(settings)
    show(settings, as_json=False, progress=False)

    counted = {
        name: (one.lines, one.prompts, one.duplicates, one.malformed) for name, one in found.survey.sources.items()
    }
    assert counted["short"] == (10, 8, 1, 1)
    assert counted["long"][1] == 19  # twice the nine of `short`, and one more
    assert [one.heldout for one in found.survey.sources.values()] == [8, 0]
    assert [one.ended for one in found.survey.sources.values()] == [True, False]
    assert found.lengths.mean_by_source["short"] < found.lengths.mean_by_source["long"]
    shown = capsys.readouterr().out
    assert "short: 10 lines, 8 prompts (29.6%)" in shown
    assert "not read to its end, as another source had ended" in shown


def test_what_produce_would_refuse_is_said_first(
    settings: Settings, configure: Configure, write_jsonl: WriteJsonl
) -> None:
    data = write_jsonl(MIXED)
    url = settings.queue.url.get_secret_value() if settings.queue.url else ""
    produce(configure(data, queue__url=url), progress=False)

    pinned = dry_run(configure(data, sampling__max_tokens=65)).notes
    nameless = dry_run(configure(data, target__model="", target__path="")).notes
    elsewhere = dry_run(configure(data, storage__url="ftp://somewhere")).notes

    assert pinned[0].startswith("produce would refuse: run default exists with other settings:")
    assert "sampling.max_tokens: the run has 64, now 65" in pinned[0]
    assert any("target.model is not set" in note for note in nameless)
    assert "ftp:// is not known" in elsewhere[0]


def test_without_a_tokenizer_lengths_are_in_characters_and_it_says_so(
    configure: Configure, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    data = write_jsonl([{"prompt": "abc"}, {"prompt": "abcdef"}])

    unset, broken = (dry_run(configure(data, target__path=path)) for path in ("", str(tmp_path)))

    for found in (unset, broken):
        assert (found.lengths.unit, found.lengths.least, found.lengths.most) == ("characters", 3, 6)
        assert (found.lengths.too_long, found.lengths.cut) == (None, None)
        assert [one.rendered for one in found.shown] == [False, False]
        assert "lengths are in characters" in found.notes[-1]


def test_a_data_set_that_cannot_be_read_is_the_error_that_produce_gives(
    configure: Configure, write_jsonl: WriteJsonl
) -> None:
    for read in (dry_run, lambda settings: first_prompts(settings, 1)):
        with pytest.raises(SettingsError, match=r"producer\.data is not set"):
            read(configure(""))
        with pytest.raises(DataError, match="is not there"):
            read(configure("nowhere.jsonl"))
        with pytest.raises(DataError, match="none of its 1 lines holds a prompt"):
            read(configure(write_jsonl([{"prompt": ""}])))


def test_the_first_prompts_are_distinct_and_in_order(configure: Configure, write_jsonl: WriteJsonl) -> None:
    data = write_jsonl(MIXED)

    asked = [prompt.messages[-1]["content"] for prompt in first_prompts(configure(data), 3)]

    assert asked == ["A larger one.", "Which day is it?", "What is 0 times 0?"]
    assert first_prompts(configure(data), 0) == []
    assert len(first_prompts(configure(data), 1000)) == 203


def test_a_person_reads_marks_everywhere_and_colours_on_a_terminal(
    configure: Configure, write_jsonl: WriteJsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {"prompt": "Red \x1b[31m and \x9b31m, [bold]not markup[/bold]"}
    settings = configure(write_jsonl([*MIXED, hostile]), producer__turns="all")
    coloured = io.StringIO()

    code = show(settings, as_json=False, progress=False, num_shown=250)
    render(dry_run(settings, num_shown=250), Console(file=coloured, force_terminal=True, color_system="standard"))

    plain = capsys.readouterr().out
    assert code == 0
    assert "lines      208 = 204 prompts + 1 duplicates + 1 malformed + 2 rejected" in plain
    assert "   prompt │ <|im_start|>user↵\n   prompt │ Name a prime.<|im_end|>↵\n" in plain
    assert "  TRAINED │ 7<|im_end|>\n" in plain
    assert "   prompt │ all of the above, and then\n" in plain
    assert "the chat template leaves its tools out" in plain
    assert "Red ␛[31m and �31m, [bold]not markup[/bold]" in plain
    assert "\x1b" not in plain
    assert "\x1b[32m7\x1b[0m\x1b[1;36m<|im_end|>" in coloured.getvalue()
    assert "\x1b[31m and" not in coloured.getvalue()
