"""Prompt lengths against the tokenizer, row by row; samples that do not depend on the order of the data set."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftfleet import tokens
from draftfleet.records import Prompt, prompt_id
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer
from producer.preview import lengths
from producer.preview.lengths import Lengths, Ruler

MakePrompts = Callable[..., list[Prompt]]


def asking(text: str) -> Prompt:
    messages = [{"role": "user", "content": text}]
    return Prompt(prompt_id(messages, None), "train", messages)


PROMPTS = [asking("What is " + " and ".join(map(str, range(number))) + "?") for number in range(1, 60)]


def measured(
    prompts: list[Prompt], tokenizer: TargetTokenizer | None, *, context: int | None = None, most: int = 0
) -> Lengths:
    ruler = Ruler(tokenizer, Sampling(max_tokens=20), context, most)
    for prompt in prompts:
        ruler.add(prompt)
    return ruler.lengths()


def test_lengths_are_those_of_the_prompt_ids(tokenizer: TargetTokenizer) -> None:
    wanted = sorted(len(tokenizer.prompt_ids(prompt.messages)) for prompt in PROMPTS)

    found = measured(PROMPTS, tokenizer)

    assert (found.unit, found.measured, found.of) == ("tokens", 59, 59)
    assert (found.least, found.median, found.p90, found.p99, found.most) == (
        wanted[0], wanted[29], wanted[53], wanted[58], wanted[58],
    )  # fmt: skip
    assert found.mean == pytest.approx(sum(wanted) / 59)
    assert found.longest == PROMPTS[-1].prompt_id
    assert sum(bar.prompts for bar in found.histogram) == 59
    for bar in found.histogram:
        assert bar.prompts == sum(bar.least <= length <= bar.most for length in wanted)


def test_rows_over_the_context_and_rows_that_are_cut_are_counted_apart(tokenizer: TargetTokenizer) -> None:
    sizes = [len(tokenizer.prompt_ids(prompt.messages)) for prompt in PROMPTS]
    context = sorted(sizes)[40]

    found = measured(PROMPTS, tokenizer, context=context)

    assert found.too_long == sum(size >= context for size in sizes) > 0
    assert found.cut == sum(context - 20 < size < context for size in sizes) > 0


def test_a_sample_is_the_same_in_whatever_order_the_data_set_comes(
    tokenizer: TargetTokenizer, make_prompts: MakePrompts
) -> None:
    prompts = [*make_prompts(500), *PROMPTS]
    smallest = sorted(prompts, key=lambda prompt: prompt.prompt_id[-16:])[:25]
    wanted = sorted(len(tokenizer.prompt_ids(prompt.messages)) for prompt in smallest)

    for seed in range(3):
        shuffled = random.Random(seed).sample(prompts, len(prompts))
        found = measured(shuffled, tokenizer, most=25)

        assert (found.measured, found.of) == (25, 559)
        assert (found.least, found.median, found.most) == (wanted[0], wanted[12], wanted[-1])
        assert found.mean == pytest.approx(sum(wanted) / 25)
        assert found.stand_for(5) == "about 112"


@pytest.mark.parametrize("most", [0, 10])
def test_texts_do_not_wait_in_memory_longer_than_a_round_takes(
    tokenizer: TargetTokenizer, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    whole = measured(PROMPTS, tokenizer, most=most)
    monkeypatch.setattr(lengths, "WAITING_CHARS", 500)
    ruler = Ruler(tokenizer, Sampling(max_tokens=20), None, most)

    for prompt in PROMPTS:
        ruler.add(prompt)
        assert ruler.rounds() <= 1
        assert ruler.waiting_chars <= 500

    assert ruler.lengths() == whole


def test_a_conversation_that_the_template_refuses_costs_only_itself(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    target = shutil.copytree(tokenizer.path, tmp_path / "target")
    template = (target / "chat_template.jinja").read_text()
    alternating = "messages|length > 1 and messages[0].role == messages[1].role"
    refusal = "{% if " + alternating + " %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    (target / "chat_template.jinja").write_text(refusal + template)
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]

    found = measured([*PROMPTS, Prompt("f" * 32, "train", two)], tokens.load(target))

    assert (found.measured, found.unrenderable, sum(bar.prompts for bar in found.histogram)) == (60, 1, 59)
    assert found.unrenderable_example == f"prompt {'f' * 32}: Roles must alternate"


def test_means_are_told_for_each_source(tokenizer: TargetTokenizer) -> None:
    ruler = Ruler(None, Sampling(), None, 0)
    for text, source in (("ab", "short"), ("abcd", "short"), ("a" * 30, "long")):
        ruler.add(replace(asking(text), source=source))

    assert ruler.lengths().mean_by_source == {"long": 30, "short": 3}


def test_a_batch_of_texts_has_the_lengths_of_its_texts(tokenizer: TargetTokenizer) -> None:
    texts = ["", "a", "<|im_start|>user\nGrüße, 日本<|im_end|>", "x" * 5000]

    assert tokenizer.lengths(texts) == [len(tokenizer.encode(text)) for text in texts]
    assert tokenizer.lengths([]) == []
