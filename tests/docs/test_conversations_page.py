"""The example of the page is what the worker asks, and the ends it names are those there are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftfleet.records import Prompt, Sample
from workers import conversation
from workers.conversation import first, following

PAGE = (Path(__file__).parents[2] / "docs/conversations.md").read_text()


def block(kind: str) -> Any:
    [text] = re.findall(rf"^```json {kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return json.loads(text)


def test_the_last_turn_is_asked_as_the_page_shows(make_sample: Callable[..., Sample]) -> None:
    prompt = Prompt("p", "train", block("source"))
    asked = first(prompt, None)

    for answer in block("answers"):
        last = asked
        then = following(prompt, asked, make_sample(asked, **({"content": None} | answer)))
        asked = then if isinstance(then, Prompt) else asked

    assert then is None
    assert last.messages == block("asked")


def test_the_table_of_ends_names_every_one() -> None:
    table = PAGE.partition("| `ended` begins with |")[2].partition("\n\n")[0]

    named = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)

    assert set(named) == {conversation.CUT, conversation.FAILED, conversation.CALLS_DIFFER, conversation.NO_CALL}
