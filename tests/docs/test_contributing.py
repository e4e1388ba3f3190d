"""What a contributor is told: the map is the house, the hooks are the checks, the forms are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))

KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
"""Of fields, as the forge knows them."""


def test_the_map_names_every_folder_of_the_house() -> None:
    [drawn] = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    command = ["git", "ls-tree", "-d", "--name-only", "HEAD"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a checkout")

    folders = {name for name in listed.stdout.split() if not name.startswith(".")}

    assert set(re.findall(r"^(\w+)/", drawn, re.MULTILINE)) == folders


def test_files_and_folders_that_are_named_are_there() -> None:
    for page in (PAGE, *((ROOT / f"docs/{name}.md").read_text() for name in ("releasing", *adding()))):
        for path in re.findall(
            r"`((?:draftfleet|producer|workers|trainer|tests|docs|examples|docker)/[\w./-]*)`", page
        ):
            assert "NAME" in path or (ROOT / path).exists(), path


def adding() -> list[str]:
    return [path.stem for path in (ROOT / "docs").glob("add-a*.md")]


def test_each_seam_has_its_page_and_its_suite_in_the_table() -> None:
    rows = re.findall(r"^\| \[an? (\w+)\]\(docs/(add-an?-\w+)\.md\).*?\| `(.*?)` \| `(.*?)` \|$", PAGE, re.MULTILINE)

    assert {name for name, *_ in rows} == {"dialect", "algorithm", "target", "storage"}
    assert {page for _, page, *_ in rows} == set(adding())
    assert all((ROOT / place).is_dir() and (ROOT / suite).exists() for *_, place, suite in rows)


def test_the_hooks_are_valid_and_run_what_make_check_runs() -> None:
    config = ROOT / ".pre-commit-config.yaml"
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(config)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

    [repository] = yaml.safe_load(config.read_text())["repos"]
    hooks = {hook["id"]: hook["entry"] for hook in repository["hooks"]}
    static = (ROOT / "Makefile").read_text().partition("\nstatic:")[2].partition("\n\n")[0]

    assert repository["repo"] == "local"
    assert set(hooks) == {"format", "lint", "types"}
    for entry in hooks.values():
        [tool] = re.findall(r"-m (\w+(?: \w+)?)", entry)
        assert f"-m {tool}" in static


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_for_issues_is_one_that_the_forge_takes(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return

    fields = [field for field in form["body"] if field["type"] != "markdown"]

    assert form["name"]
    assert form["description"]
    assert {field["type"] for field in form["body"]} <= KINDS
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields) > 0
    for field in fields:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert set(field["attributes"]) <= {"label", "description", "placeholder", "value", "render", "options"}
