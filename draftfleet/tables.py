"""Tables in windows of any width: columns leave, the least important first; then each row is a paragraph.

Nothing is broken in its middle: neither a cell, nor a figure from its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LONGEST_ELASTIC = 120
"""Characters of an elastic cell in a paragraph."""


class Fitted:
    """`least` is the width in columns from which on the table is worth showing. Unset: where no cell is broken.

    `leave` names columns that may leave where there is no room, the first one first. The column named by `elastic` may
    be cut at its end, to no less than `elastic_least` columns.
    """

    def __init__(
        self,
        table: Table,
        least: int | None = None,
        *,
        leave: Sequence[str] = (),
        elastic: str | None = None,
        elastic_least: int = 24,
    ) -> None:
        self._table = table
        self._least = least
        self._leave = leave
        self._elastic = elastic
        self._elastic_least = elastic_least

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in self._narrower():
            least = self._least or self._width(console, options, table)
            if least <= options.max_width:
                yield self._with_elastic(table, self._elastic_least + options.max_width - least)
                return
        if self._table.title:
            yield Text(str(self._table.title), style="italic")
        names = [str(column.header) for column in self._table.columns]
        has_name = self._table.columns[0].justify == "left"
        for row in zip(*(column.cells for column in self._table.columns), strict=True):
            said = [(name, self._cut(name, str(cell))) for name, cell in zip(names, row, strict=True) if str(cell)]
            if has_name:
                yield Text(f"  {said.pop(0)[1]}", style="bold")
            items = [Text.assemble((name, "dim"), " ", value) for name, value in said]
            yield Padding(Packed(items), (0, 0, 0, 4 if has_name else 2))
        if self._table.caption:
            yield Text(str(self._table.caption), style="italic dim")

    def _narrower(self) -> Iterator[Table]:
        """The table, then without one column more each time."""
        for num_left in range(len(self._leave) + 1):
            gone = self._leave[:num_left]
            table = copy(self._table)
            stay = [column for column in self._table.columns if str(column.header) not in gone]
            table.columns = [replace(column, _index=index) for index, column in enumerate(stay)]
            yield table

    def _width(self, console: Console, options: ConsoleOptions, table: Table) -> int:
        """What it takes at the least."""
        narrow = self._with_elastic(table, self._elastic_least)
        return Measurement.get(console, options.update(max_width=10_000), narrow).maximum

    def _with_elastic(self, table: Table, most: int) -> Table:
        """The elastic column is at most so wide."""
        shaped = copy(table)
        shaped.columns = [
            replace(column, max_width=most, no_wrap=True, overflow="ellipsis")
            if str(column.header) == self._elastic
            else column
            for column in table.columns
        ]
        return shaped

    def _cut(self, name: str, cell: str) -> str:
        is_long = name == self._elastic and len(cell) > LONGEST_ELASTIC
        return cell[: LONGEST_ELASTIC - 1] + "…" if is_long else cell


class Packed:
    """Short texts with commas between, as many in a line as fit. One that is longer than a line goes on."""

    def __init__(self, items: Sequence[Text | str]) -> None:
        self._items = [Text(item) if isinstance(item, str) else item for item in items]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for number, item in enumerate(self._items):
            shown = Text.assemble(item, "," if number < len(self._items) - 1 else "")
            if line and line.cell_len + 1 + shown.cell_len > options.max_width:
                yield line
                line = Text()
            line = Text.assemble(line, " ", shown) if line else shown
        if line:
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [item.cell_len + 1 for item in self._items] or [0]
        return Measurement(min(max(widths), options.max_width), min(sum(widths) + len(widths), options.max_width))
