"""A table where the window is wide enough for it, else each of its rows as a paragraph under its name."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


class Fitted:
    """`least` is the width in columns from which on the table is worth showing. Unset: where no cell is broken."""

    def __init__(self, table: Table, least: int | None = None) -> None:
        self._table = table
        self._least = least

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=10_000)
        least = self._least or Measurement.get(console, unlimited, self._table).maximum
        if least <= options.max_width:
            yield self._table
            return
        if self._table.title:
            yield Text(str(self._table.title), style="italic")
        names = [str(column.header) for column in self._table.columns]
        has_name = self._table.columns[0].justify == "left"
        for row in zip(*(column.cells for column in self._table.columns), strict=True):
            said = [(name, str(cell)) for name, cell in zip(names, row, strict=True) if str(cell)]
            if has_name:
                yield Text(f"  {said.pop(0)[1]}", style="bold")
            text = Text(", ").join(Text.assemble((name, "dim"), " ", value) for name, value in said)
            yield Padding(text, (0, 0, 0, 4 if has_name else 2))
        if self._table.caption:
            yield Text(str(self._table.caption), style="italic dim")
