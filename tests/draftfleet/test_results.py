"""What a verb ends with."""

from __future__ import annotations

import json

import pytest

from draftfleet import results


def test_mappings_of_a_list_have_a_line_each_for_a_person_and_stay_a_list_for_a_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = [{"name": "a", "lines": 60}, {"name": "b", "lines": 2000}]

    results.show("mix", "produced", {"sources": sources, "files": ["x", "y"]})

    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "produced",
        "  run      mix",
        "  sources  name a, lines 60",
        "           name b, lines 2,000",
        "  files    x / y",
    ]
    assert json.loads(said.out)["sources"] == sources
