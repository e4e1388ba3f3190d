"""Tables in windows of several widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from draftfleet.tables import Fitted


def shown(width: int, least: int | None = None) -> str:
    table = Table(title="workers")
    table.add_column("worker")
    table.add_column("server", overflow="fold")
    table.add_column("rows", justify="right")
    table.add_row("node-a-4711", "http://127.0.0.1:9100", "91")
    table.add_row("node-b-4712", "", "7")
    console = Console(file=io.StringIO(), width=width)
    console.print(Fitted(table, least))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("width", "least"), [(80, None), (30, 30)])
def test_where_there_is_room_it_is_a_table(width: int, least: int | None) -> None:
    said = shown(width, least)

    assert "┃" in said
    assert "http://127.0.0.1:9100" in said or least


def test_where_a_cell_would_be_broken_each_row_is_a_paragraph_of_what_it_has() -> None:
    said = [line.rstrip() for line in shown(40).splitlines()]

    assert said == [
        "workers",
        "  node-a-4711",
        "    server http://127.0.0.1:9100,",
        "    rows 91",
        "  node-b-4712",
        "    rows 7",
    ]
