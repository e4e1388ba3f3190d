"""The pages of servers and dialects are held against the dialects."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from draftfleet.errors import Mismatch
from draftfleet.settings import Sampling
from draftfleet.settings.sections import Worker
from workers import dialects
from workers.dialects import Ask

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "servers.md").read_text()
COLUMNS = {"vLLM, SGLang": "vllm", "llama.cpp": "llamacpp", "transformers": "transformers", "Ollama": "ollama"}
VALUES = {"temperature": 1.0, "stop": ["a"], "reasoning_effort": "low", "thinking": False, "top_k": 5}


def rows(header: str) -> list[list[str]]:
    """The cells of a table, without its header."""
    lines = PAGE.partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_of_dialects_names_every_one_in_the_order_in_which_they_are_tried() -> None:
    assert [row[0].strip("`") for row in rows("| dialect | known by |")] == list(dialects.DIALECTS)


def test_the_setting_names_every_dialect() -> None:
    said = Worker.model_fields["dialect"].description or ""

    assert re.findall(r"[a-z][a-z-]+(?=,| or|\.)", said) == ["auto", *dialects.DIALECTS]


@pytest.mark.parametrize(("column", "name"), COLUMNS.items())
def test_the_table_of_knobs_says_what_each_dialect_refuses(column: str, name: str) -> None:
    header = PAGE.partition("| knob |")[2].splitlines()[0]
    at = [cell.strip() for cell in header.split(" | ")].index(column) + 1
    checked = 0
    for row in rows("| knob |"):
        for knob in re.findall(r"`(\w+)`", row[0]):
            sampling = Sampling.model_validate({knob: VALUES.get(knob, 0.5)})
            try:
                dialects.load(name).request(Ask(model="tiny", messages=[], sampling=sampling))
                is_refused = False
            except Mismatch:
                is_refused = True
            assert (row[at] == "refused") == is_refused, knob
            checked += 1
    assert checked == 10


def test_the_example_of_a_dialect_is_one() -> None:
    page = (DOCS / "add-a-dialect.md").read_text()
    [code] = re.findall(r"^```python module\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    made = ModuleType("made")
    exec(code, made.__dict__)
    ask = Ask(model="tiny", messages=[{"role": "user", "content": "a"}], sampling=Sampling(repetition_penalty=1.1))
    choice = {"message": {"content": "b"}, "finish_reason": "stop", "response_token_ids": [1, 2]}

    answer = made.parse({"choices": [choice]})

    assert made.request(ask).body["repeat_penalty"] == 1.1
    with pytest.raises(Mismatch, match=r"sampling\.min_p"):
        made.request(Ask(model="tiny", messages=[], sampling=Sampling(min_p=0.1)))
    assert (answer.content, answer.token_ids) == ("b", [1, 2])
    assert made.recognizes({"data": [{"id": "a", "owned_by": "name"}]}, "", {})
    assert {name for name in dir(dialects.Dialect) if not name.startswith("_")} <= set(dir(made))
