"""Which prompts are wanted, each that is not under its reason; and the same sample for the same seed."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftfleet.errors import DataError, SettingsError
from draftfleet.records import Prompt, prompt_id
from draftfleet.settings import Producer, load
from producer.drawing import Draw
from producer.lengths import token_counter
from producer.reading import Reading
from producer.sources import open_source

Knobs = Callable[..., Producer]
WriteJsonl = Callable[..., Path]
TARGET = Path(__file__).parents[2] / "examples" / "tiny-target"


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


ROWS: list[dict[str, Any]] = [
    {"messages": turns("alpha", "yes", "beta"), "language": "English"},
    {"messages": turns("gamma"), "language": "english "},
    {"messages": turns("delta"), "language": "German"},
    {"messages": turns("epsilon " * 50), "language": None},
]


def read(knobs: Producer, **more: Any) -> tuple[list[str], dict[str, int]]:
    reading = Reading(open_source(knobs), knobs, **more)
    last = [prompt.messages[-1]["content"][:7] for prompt in reading]
    assert reading.lines == len(last) + reading.duplicates + reading.malformed + reading.rejected.total()
    return last, dict(reading.rejected)


@pytest.mark.parametrize(
    ("filters", "kept", "reasons"),
    [
        ({"languages": ["English"]}, ["beta", "gamma"], {"filtered: language": 2}),
        ({"languages": ["german", "FRENCH"]}, ["delta"], {"filtered: language": 3}),
        ({"min_prompt_chars": 6}, ["beta", "epsilon"], {"filtered: too short": 2}),
        ({"max_prompt_chars": 12}, ["beta", "gamma", "delta"], {"filtered: too long": 1}),
        ({"max_prompt_chars": 11}, ["gamma", "delta"], {"filtered: too long": 2}),
        ({"keep": "^(beta|delta)$"}, ["beta", "delta"], {"filtered: keep": 2}),
        ({"drop": "alpha"}, ["beta", "gamma", "delta", "epsilon"], {}),
        ({"drop": "alpha", "match": "any"}, ["gamma", "delta", "epsilon"], {"filtered: drop": 1}),
        ({"keep": "alpha", "match": "any"}, ["beta"], {"filtered: keep": 3}),
        ({"keep": "(?i)GAMMA", "languages": ["english"]}, ["gamma"], {"filtered: language": 2, "filtered: keep": 1}),
    ],
)
def test_what_is_not_wanted_is_counted_under_why(
    knobs: Knobs, write_jsonl: WriteJsonl, filters: dict[str, Any], kept: list[str], reasons: dict[str, int]
) -> None:
    assert read(knobs(write_jsonl(ROWS), **filters)) == (kept, reasons)


def test_what_is_filtered_is_not_named_line_by_line(
    knobs: Knobs, write_jsonl: WriteJsonl, caplog: pytest.LogCaptureFixture
) -> None:
    read(knobs(write_jsonl(ROWS), drop="gamma"))

    assert caplog.messages == []


def test_length_in_tokens_is_that_of_the_targets_template(write_jsonl: WriteJsonl) -> None:
    flags = {"producer.data": str(write_jsonl(ROWS)), "producer.max_prompt_tokens": 40, "target.path": str(TARGET)}
    settings = load(flags=flags)
    count = token_counter(settings)
    assert count is not None

    assert read(settings.producer, count_tokens=count) == (["beta", "gamma", "delta"], {"filtered: too long": 1})
    longest = count(Prompt("0" * 32, "train", ROWS[0]["messages"]))
    exact = settings.producer.model_copy(update={"min_prompt_tokens": longest, "max_prompt_tokens": longest})
    assert read(exact, count_tokens=count)[0] == ["beta"]


def test_length_in_tokens_without_a_tokenizer_says_what_to_set(write_jsonl: WriteJsonl) -> None:
    with pytest.raises(SettingsError, match=r"max_prompt_tokens need target\.path: .*max_prompt_chars"):
        token_counter(load(flags={"producer.data": "a.jsonl", "producer.min_prompt_tokens": 1}))


def test_another_column_may_say_the_language_and_one_that_is_not_there_is_said(
    knobs: Knobs, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "tongue": "en"}, {"prompt": "b", "tongue": "de"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")

    for path in (write_jsonl(rows), tmp_path / "data.parquet"):
        assert read(knobs(path, languages=["en"], language_column="tongue"))[0] == ["a"]
    with pytest.raises(DataError, match=r"none of the columns language, lang, .*producer\.language_column"):
        read(knobs(tmp_path / "data.parquet", languages=["en"]))
    with pytest.raises(DataError, match=r"no column tong\. .*Did you mean tongue\? .*producer\.language_column"):
        read(knobs(tmp_path / "data.parquet", languages=["en"], language_column="tong"))
    with pytest.raises(DataError, match=r"The first: line 1: filtered: language: it names no language"):
        read(knobs(write_jsonl(rows), languages=["en"]))


def prompts(numbers: range) -> Iterator[Prompt]:
    for number in numbers:
        messages = [{"role": "user", "content": f"question {number} of very many"}]
        yield Prompt(prompt_id(messages, None), "train", messages, source="here")


def test_the_same_seed_draws_the_same_prompts_whatever_their_order() -> None:
    shuffled = list(prompts(range(2000)))
    random.Random(1).shuffle(shuffled)
    place = {prompt.prompt_id: number for number, prompt in enumerate(shuffled)}

    drawn = list(Draw(prompts(range(2000)), 50, seed=7))
    again = list(Draw(shuffled, 50, seed=7))

    assert len(drawn) == 50
    assert sorted(map(str, drawn)) == sorted(map(str, again))
    in_order = [int(prompt.messages[0]["content"].split()[1]) for prompt in drawn]
    assert in_order == sorted(in_order)
    assert [place[prompt.prompt_id] for prompt in again] == sorted(place[prompt.prompt_id] for prompt in again)


def test_another_seed_draws_others_and_a_larger_sample_holds_the_smaller() -> None:
    def draw(size: int, seed: int) -> set[str]:
        return {prompt.prompt_id for prompt in Draw(prompts(range(2000)), size, seed)}

    assert draw(50, 0) < draw(200, 0)
    assert len(draw(1000, 0) & draw(1000, 1)) == pytest.approx(500, abs=80)  # 11 is one standard deviation
    assert draw(5000, 0) == {prompt.prompt_id for prompt in prompts(range(2000))}


def test_every_prompt_has_the_same_chance() -> None:
    halves = [
        sum(int(p.messages[0]["content"].split()[1]) < 500 for p in Draw(prompts(range(1000)), 100, s))
        for s in range(20)
    ]

    assert sum(halves) == pytest.approx(1000, abs=110)  # 21 is one standard deviation


def test_a_sample_counts_distinct_prompts_and_all_others_under_their_reason(
    knobs: Knobs, write_jsonl: WriteJsonl
) -> None:
    rows: list[Any] = [{"prompt": f"{number}?"} for number in range(30)] * 2
    path = write_jsonl([*rows, {"prompt": ""}, 7])

    reading = Reading(open_source(knobs(path, sample=10)), knobs(path, sample=10))
    drawn = [prompt.prompt_id for prompt in reading]

    assert len(set(drawn)) == len(drawn) == 10
    assert (reading.lines, reading.malformed, reading.duplicates) == (62, 1, 10)
    assert reading.rejected == {"not in the sample": 40, "empty prompt": 1}
    assert {prompt.source for prompt in Reading(open_source(knobs(path, sample=3)), knobs(path, sample=3))} == {"data"}


def test_a_sample_is_drawn_of_what_is_wanted(knobs: Knobs, write_jsonl: WriteJsonl) -> None:
    path = write_jsonl({"prompt": f"{number}?", "lang": "en" if number % 10 else "de"} for number in range(200))

    kept, reasons = read(knobs(path, sample=15, languages=["de"]))

    assert len(kept) == 15
    assert reasons == {"filtered: language": 180, "not in the sample": 5}


def test_a_sample_of_many_takes_the_memory_of_the_sample() -> None:
    tracemalloc.start()
    num_drawn = sum(1 for _ in Draw(prompts(range(30_000)), 1000, seed=0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert num_drawn == 1000
    assert peak < 1e6
