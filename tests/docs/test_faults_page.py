"""The page of faults names tests that are there, and leaves out none of the fault suite that is about a fault."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "docs/faults.md").read_text()))
ABOUT_NO_FAULT = {
    "test_bad_rows_of_each_kind_are_listed_and_after_the_server_was_mended_revived_each_once",
    "test_rows_are_revived_while_the_run_is_still_asked_and_while_nobody_hears_of_it",
    "test_a_batch_without_readable_prompts_is_a_dead_letter_until_they_are_restored",
    "test_a_server_that_comes_up_in_a_range_of_ports_joins_and_empty_ports_make_no_noise",
    "test_an_adaptive_limit_finds_the_slots_of_a_server_and_says_so",
}
"""They are told on the pages of dead letters and of servers."""


def written_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_that_the_page_names_is_there() -> None:
    missing = [f"{path}::{name}" for path, name in sorted(NAMED) if name not in written_in(ROOT / path)]

    assert len(NAMED) > 40
    assert missing == []


def test_every_test_of_the_fault_suite_is_on_the_page() -> None:
    written = {name for path in (ROOT / "tests/faults").glob("test_*.py") for name in written_in(path)}

    assert written - {name for _, name in NAMED} == ABOUT_NO_FAULT
