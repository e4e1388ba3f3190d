"""What a person is told who types a verb, a flag or a run wrongly: one line, with the nearest that there is."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from draftfleet import cli
from draftfleet.errors import RunMissing
from draftfleet.runs import Run
from draftfleet.storage import FileStorage


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("statu", "No such command 'statu'. Did you mean 'status'? `draftfleet --help` lists what there is."),
        ("runs lst", "No such command 'lst'. Did you mean 'list'? `draftfleet runs --help` lists what there is."),
        ("status --wacth", "No such option: --wacth (Possible options: --watch). `draftfleet status --help`"),
        ("dead show", "Missing argument 'ROW'. `draftfleet dead show --help`"),
        ("dead list --limit few", "Invalid value for '--limit'"),
        ("runs budget r --set", "Option '--set' requires an argument. `draftfleet"),
    ],
)
def test_a_wrong_word_is_told_in_one_line_with_exit_code_2(line: str, said: str) -> None:
    result = CliRunner().invoke(cli.app, line.split(), prog_name="draftfleet")

    assert result.exit_code == 2
    assert result.stderr.startswith(f"draftfleet: {said}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_run_that_is_not_there_is_told_with_the_nearest_names(storage: FileStorage) -> None:
    for name in ("qwen3", "qwen3-thinking", "kimi"):
        Run.create(storage, name, {}, {})

    with pytest.raises(RunMissing, match=r"run quen3 is not in file://.*, which has qwen3: make it with"):
        Run.open(storage, "quen3")


def test_of_an_empty_storage_it_says_so(storage: FileStorage) -> None:
    with pytest.raises(RunMissing, match="which has no run: make it with"):
        Run.open(storage, "any")
