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
from producer.prompts import Malformed, Rejected, Row, Rules, read_prompt
from producer.sources import Line, Source

log = logging.getLogger(__name__)

NAMED = 10
"""Malformed and rejected lines that are each named in the log; the rest is a count."""
PATIENCE_LINES = 100
"""Rows without the column, and none with it, after which the column is wrong and not the lines."""


class Reading:
    """Iterate once. `lines` = prompts yielded + `malformed` + the sum of `rejected`, at any moment.

    Raises DataError where the source breaks off, holds no prompt at all, or, with `strict`, has a malformed line.
    """

    def __init__(self, source: Source, knobs: settings.Producer) -> None:
        self.source = source
        self.lines = 0
        self.malformed = 0
        self.rejected: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        """The first line of each kind of fault: of `malformed`, and of each reason in `rejected`."""
        self._knobs = knobs
        self._rules = Rules.of(knobs)
        self._column_seen = False
        self._held: list[tuple[int, Malformed]] = []
        self._columns: dict[str, None] = {}
        self._named: Counter[str] = Counter()
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
        if self._held:
            raise self._no_column()
        if not num_prompts:
            raise self._nothing()

    def _read(self, line: Line) -> Prompt | None:
        try:
            if isinstance(line.row, Malformed):
                raise line.row
            if not self._column_seen:
                self._look_for_column(line.row)
            return read_prompt(line.row, self._rules)
        except Malformed as fault:
            self.malformed += 1
            self.examples.setdefault("malformed", f"line {line.number}: {fault}")
            if self._column_seen or isinstance(line.row, Malformed):
                self._tell_malformed(line.number, fault)
            else:
                self._hold(line.number, fault)
        except Rejected as fault:
            self.rejected[fault.reason] += 1
            self.examples.setdefault(fault.reason, f"line {line.number}: {fault}")
            self._name("line rejected", line.number, fault)
        return None

    def _look_for_column(self, row: Row) -> None:
        self._columns |= dict.fromkeys(row)
        self._column_seen = self._rules.are_met_by(row)
        if self._column_seen:
            for number, fault in self._held:
                self._tell_malformed(number, fault)
            self._held.clear()

    def _hold(self, number: int, fault: Malformed) -> None:
        """Told once another row has the column: till then the setting may be what is wrong."""
        self._held.append((number, fault))
        if len(self._held) >= PATIENCE_LINES:
            raise self._no_column() from None

    def _tell_malformed(self, number: int, fault: Malformed) -> None:
        if self._knobs.strict:
            raise DataError(
                f"{self.source.name}, line {number}: {fault}. Mend the line, or set producer.strict = false to have "
                "such lines counted and left out."
            ) from None
        self._name("line malformed", number, fault)

    def _name(self, text: str, number: int, fault: Exception) -> None:
        self._first_fault = self._first_fault or f"line {number}: {fault}"
        self._named[text] += 1
        if self._named[text] <= NAMED:
            log.warning(event(text, source=self.source.name, line=number, why=fault))
        if self._named[text] == NAMED:
            log.warning(event("further ones counted only", after=text, source=self.source.name))

    def _no_column(self) -> DataError:
        self._rules.check(self.source.name, list(self._columns))
        number, fault = self._held[0]
        return DataError(
            f"{self.source.name}: each of {len(self._held)} rows lacks a column, or holds null in it. "
            f"The first: line {number}: {fault}. Name another one with producer.column or producer.split_column."
        )

    def _nothing(self) -> DataError:
        if not self.lines:
            return DataError(f"{self.source.name} is empty: there is no line in it.")
        return DataError(
            f"{self.source.name}: none of its {self.lines} lines holds a prompt that can be asked. "
            f"The first: {self._first_fault}. docs/producing.md shows the accepted shapes."
        )
