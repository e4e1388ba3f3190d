"""One pass over a source: its prompts, and a count of every line that was none."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from draftfleet import settings
from draftfleet.errors import DataError
from draftfleet.logs import event
from draftfleet.records import Prompt
from producer.prompts import ColumnMissing, Malformed, Rejected, Row, Rules, read_prompt, unknown_column
from producer.sources import Line, Source

log = logging.getLogger(__name__)

NAMED = 10
"""Malformed and rejected lines that are each named in the log; the rest is a count."""
PATIENCE_LINES = 100
"""Lines without the column, and none with it, after which the column is wrong and not the lines."""


class Reading:
    """Iterate once. `lines` = prompts yielded + `malformed` + the sum of `rejected`, at any moment.

    Raises DataError where the source breaks off, holds no prompt at all, or, with `strict`, has a malformed line.
    """

    def __init__(self, source: Source, knobs: settings.Producer) -> None:
        self.source = source
        self.lines = 0
        self.malformed = 0
        self.rejected: Counter[str] = Counter()
        self._knobs = knobs
        self._rules = Rules.of(knobs)
        self._column_seen = False
        self._first_fault = ""
        if source.columns is not None:
            self._rules.check(source.name, source.columns)

    def __iter__(self) -> Iterator[Prompt]:
        num_prompts = 0
        for line in islice(self.source.lines(self._rules.readable), self._knobs.limit):
            self.lines += 1
            prompt = self._read(line)
            if prompt is not None:
                num_prompts += 1
                yield prompt
        assert self.lines == num_prompts + self.malformed + self.rejected.total()
        if not num_prompts:
            raise self._nothing()

    def _read(self, line: Line) -> Prompt | None:
        try:
            if isinstance(line.row, Malformed):
                raise line.row
            prompt = read_prompt(line.row, self._rules)
        except ColumnMissing as fault:
            self._count_malformed(line.number, fault)
            if not self._column_seen and self.lines >= PATIENCE_LINES and not isinstance(line.row, Malformed):
                raise self._unknown_column(line.row) from None
            return None
        except Malformed as fault:
            self._count_malformed(line.number, fault)
            return None
        except Rejected as fault:
            self._column_seen = True
            self.rejected[fault.reason] += 1
            self._name("line rejected", self.rejected.total(), line.number, fault)
            return None
        self._column_seen = True
        return prompt

    def _count_malformed(self, number: int, fault: Malformed) -> None:
        if self._knobs.strict:
            raise DataError(
                f"{self.source.name}, line {number}: {fault}. Mend the line, or set producer.strict = false to have "
                "such lines counted and left out."
            ) from None
        self.malformed += 1
        self._name("line malformed", self.malformed, number, fault)

    def _name(self, text: str, count: int, number: int, fault: Exception) -> None:
        self._first_fault = self._first_fault or f"line {number}: {fault}"
        if count <= NAMED:
            log.warning(event(text, source=self.source.name, line=number, why=fault))
        if count == NAMED:
            log.warning(event("further ones counted only", after=text, source=self.source.name))

    def _unknown_column(self, row: Row) -> DataError:
        named = [name for name in (self._rules.column, self._rules.split_column) if name]
        missing = next((name for name in named if name not in row), None)
        return unknown_column(self.source.name, list(row), missing)

    def _nothing(self) -> DataError:
        if not self.lines:
            return DataError(f"{self.source.name} is empty: there is no line in it.")
        return DataError(
            f"{self.source.name}: none of its {self.lines} lines holds a prompt that can be asked. "
            f"The first: {self._first_fault}. docs/producing.md shows the accepted shapes."
        )
