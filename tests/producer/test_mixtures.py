"""Several data sets as one: by weight, by name, and each line counted where it belongs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from draftfleet.errors import DataError, SettingsError
from draftfleet.settings import Producer
from producer.mixing import by_turns
from producer.reading import Reading
from producer.sources import open_source
from producer.unchanged import fingerprint

WriteJsonl = Callable[..., Path]


@pytest.fixture
def mix(write_jsonl: WriteJsonl) -> Callable[..., Producer]:
    """Sources by name: how many questions each has, and what else is set on it."""

    def make(sizes: dict[str, int], each: dict[str, dict[str, Any]] | None = None, **knobs: Any) -> Producer:
        sources = [
            {
                "data": str(write_jsonl(({"prompt": f"{name} {n}?"} for n in range(size)), f"{name}.jsonl")),
                **(each or {}).get(name, {}),
            }
            for name, size in sizes.items()
        ]
        return Producer(sources=sources, **knobs)  # type: ignore[arg-type]

    return make


Mix = Callable[..., Producer]


def read(knobs: Producer) -> Reading:
    return Reading(open_source(knobs), knobs)


def weights(**shares: float) -> dict[str, dict[str, Any]]:
    return {name: {"weight": share} for name, share in shares.items()}


def test_turns_are_as_even_as_the_weights_allow() -> None:
    def take(*weights: float) -> str:
        streams = [iter(name * 100) for name in "abc"[: len(weights)]]
        return "".join(islice(by_turns(streams, weights, "first"), 9))

    assert take(2, 1) == "abaabaaba"
    assert take(1, 1, 1) == "abcabcabc"
    assert take(0.2, 0.1) == take(2, 1)
    assert Counter(take(5, 3, 1)) == {"a": 5, "b": 3, "c": 1}


def test_shares_hold_to_the_end_which_is_that_of_the_first_source_that_ends(mix: Mix) -> None:
    reading = read(mix({"large": 100, "small": 10}, weights(large=0.75, small=0.25)))

    prompts = Counter(prompt.source for prompt in reading)

    assert prompts == {"small": 10, "large": 32}  # 30 and those before an eleventh small one
    assert {part.name: (part.lines, part.has_ended) for part in reading.parts} == {
        "large": (32, False),
        "small": (10, True),
    }


def test_without_weights_and_with_until_all_every_source_is_read_whole(mix: Mix) -> None:
    sizes = {"large": 20, "small": 3}
    plain = [prompt.source for prompt in read(mix(sizes))]
    weighted = [prompt.source for prompt in read(mix(sizes, weights(large=3, small=1), until="all"))]

    assert plain[:6] == ["large", "small"] * 3
    assert weighted[:8] == ["large", "large", "small", "large", "large", "large", "small", "large"]
    for found in (plain, weighted):
        assert Counter(found) == {"large": 20, "small": 3}
    assert Counter(prompt.source for prompt in read(mix(sizes, until="first"))) == {"large": 4, "small": 3}


def test_the_order_is_the_same_every_time(mix: Mix) -> None:
    knobs = mix({"a": 50, "b": 30, "c": 40}, weights(a=0.5, b=0.2, c=0.3))

    assert [prompt.prompt_id for prompt in read(knobs)] == [prompt.prompt_id for prompt in read(knobs)]


def test_each_source_has_its_own_limit_and_the_mixture_one_for_all(mix: Mix) -> None:
    own = read(mix({"a": 50, "b": 50}, {"a": {"limit": 5}}))
    whole = read(mix({"a": 50, "b": 50}, limit=9))

    assert Counter(prompt.source for prompt in own) == {"a": 5, "b": 50}
    assert Counter(prompt.source for prompt in whole) == {"a": 5, "b": 4}
    assert whole.lines == 9


def test_what_a_source_leaves_unset_is_as_for_all_and_what_it_sets_is_its_own(mix: Mix) -> None:
    reading = read(mix({"a": 12, "b": 12}, {"b": {"keep": "5"}}, keep="7"))

    assert [prompt.messages[0]["content"] for prompt in reading] == ["a 7?", "b 5?"]


def test_a_source_may_be_held_out_whole(mix: Mix) -> None:
    reading = read(mix({"train": 50, "bench": 20}, {"bench": {"heldout": 1}}, heldout=0))

    assert Counter((prompt.source, prompt.split) for prompt in reading) == {
        ("train", "train"): 50,
        ("bench", "heldout"): 20,
    }


def test_every_line_is_counted_with_its_source(write_jsonl: WriteJsonl) -> None:
    good = write_jsonl([{"prompt": "a?"}, {"prompt": ""}, {"prompt": "b?"}], "good.jsonl")
    poor = write_jsonl([{"prompt": 7}, {"question": "c?"}, []], "poor.jsonl")
    reading = read(Producer(sources=[{"data": str(good)}, {"data": str(poor)}]))  # type: ignore[list-item]

    prompts = list(reading)

    assert [(part.name, part.lines, part.prompts, part.malformed) for part in reading.parts] == [
        ("good", 3, 2, 0),
        ("poor", 3, 1, 2),
    ]
    assert (reading.lines, len(prompts), reading.malformed, reading.rejected) == (6, 3, 2, {"empty prompt": 1})


def test_a_source_without_a_prompt_is_an_error_that_names_it(mix: Mix, write_jsonl: WriteJsonl) -> None:
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        list(read(mix({"full": 5, "empty": 0})))


@pytest.mark.parametrize(
    ("knobs", "wrong"),
    [
        (
            {"sources": [{"data": "x/a.jsonl"}, {"data": "y/a.jsonl"}]},
            r"producer\.sources\[0\] and producer\.sources\[1\] are both named a, .* give each a `name`",
        ),
        (
            {"sources": [{"data": "a", "weight": 1}, {"data": "b"}]},
            r"producer\.sources\[1\]\.weight is not set, and others are",
        ),
        ({"sources": [{"weight": 1}]}, r"producer\.sources\[0\]\.data is not set"),
        ({"sources": [{"data": "a"}], "data": "b"}, r"producer\.data and producer\.sources are both set"),
        ({"sources": [{"data": "a"}], "sample": 3}, r"producer\.sample and producer\.sources are both set"),
        ({}, r"producer\.data is not set: name files, a folder, a data set on the hub or a preset"),
    ],
)
def test_a_mixture_that_says_too_much_or_too_little_is_refused(knobs: dict[str, Any], wrong: str) -> None:
    with pytest.raises(SettingsError, match=wrong):
        open_source(Producer(**knobs))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("chats.jsonl.gz", "chats"),
        ("some/folder/chats-*.parquet", "chats"),
        ("some/folder/*.parquet", "folder"),
        ("org/name", "org/name"),
        ("squad", "squad"),
        (["x/one.jsonl", "x/two.jsonl"], "one"),
        ("preset:gsm8k", "gsm8k"),
    ],
)
def test_a_source_is_named_after_its_data(data: str | list[str], name: str) -> None:
    from producer.chosen import chosen

    assert chosen(Producer(data=data))[0].name == name


def test_a_mixture_is_recognised_by_its_content_and_by_how_it_is_mixed(mix: Mix) -> None:
    def known(share: float, **knobs: Any) -> str | None:
        producer = mix({"a": 5, "b": 5}, weights(a=1, b=share), **knobs)
        return fingerprint(open_source(producer), producer)

    first = known(1)
    assert first is not None
    assert known(1) == first
    assert len({first, known(2), known(1, limit=3), known(1, until="all"), known(1, keep="x")}) == 5
    assert known(1, max_prompt_tokens=5) is None
