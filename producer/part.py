"""One pass over one source: its prompts, and a count of every line that was none."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from draftfleet import settings
from draftfleet.errors import DataError
from draftfleet.logs import event
from draftfleet.records import Prompt
from producer.drawing import Draw
from producer.filters import CountTokens, Filters
from producer.prompts import Rules, read_prompt
from producer.shapes import Filtered, Malformed, Rejected, Row
from producer.sources import Line, Source

log = logging.getLogger(__name__)

NAMED = 10
"""Malformed and rejected lines of a source that are each named in the log; the rest is a count."""
PATIENCE_LINES = 100
"""Rows without the column, and none with it, after which the column is wrong and not the lines."""
NOT_DRAWN = "not in the sample"


class Allowance:
    """How many lines may be read of all sources together; None: any number."""

    def __init__(self, lines: int | None) -> None:
        self._left = lines

    def take(self) -> bool:
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0


class Part:
    """Iterate once. `lines` = prompts yielded + `duplicates` + `malformed` + the sum of `rejected`.

    That holds at any moment, but while a sample is drawn: then the prompts come at the end.
    """

    def __init__(
        self,
        source: Source,
        named: settings.Source,
        knobs: settings.Producer,
        allowed: Allowance,
        count_tokens: CountTokens | None,
    ) -> None:
        self.source = source
        self.name = named.name
        self.lines = 0
        self.prompts = 0
        self.duplicates = 0
        self.malformed = 0
        self.rejected: Counter[str] = Counter()
        self.has_ended = False
        """Read to its end, or to its own limit: not left off because another source had ended."""
        self.first_fault = ""
        self.examples: dict[str, str] = {}
        """The first line of each kind of fault: of `malformed`, and of each reason in `rejected`."""
        self._named_in_settings = named
        self._knobs = knobs
        self._allowed = allowed
        self._rules = Rules.of(named, knobs)
        self._filters = Filters(named, self._rules, count_tokens)
        self._column_seen = False
        self._held: list[tuple[Line, Malformed]] = []
        self._columns: dict[str, None] = {}
        self._num_named: Counter[str] = Counter()
        if source.columns is not None:
            self._rules.check(source.name, source.columns)

    def __iter__(self) -> Iterator[Prompt]:
        size = self._named_in_settings.sample
        for prompt in self._drawn(size) if size else self._all():
            self.prompts += 1
            yield prompt
        if not self.prompts and self.has_ended:
            raise self._nothing()

    def _drawn(self, size: int) -> Iterator[Prompt]:
        draw = Draw(self._all(), size, self._knobs.seed)
        drawn = iter(draw)
        first = next(drawn, None)
        self.duplicates = draw.duplicates
        if draw.num_left_out:
            self.rejected[NOT_DRAWN] += draw.num_left_out
        if first is not None:
            yield first
            yield from drawn

    def _all(self) -> Iterator[Prompt]:
        for line in islice(self.source.lines(self._rules.readable), self._named_in_settings.limit):
            if not self._allowed.take():
                return
            self.lines += 1
            prompt = self._read(line)
            if prompt is not None:
                yield prompt
        self.has_ended = True
        if self._held:
            raise self._no_column()

    def _read(self, line: Line) -> Prompt | None:
        try:
            if isinstance(line.row, Malformed):
                raise line.row
            if not self._column_seen:
                self._look_for_column(line.row)
            prompt = read_prompt(line.row, self._rules)
            self._filters.check(line.row, prompt)
            return prompt
        except Malformed as fault:
            self.malformed += 1
            self.examples.setdefault("malformed", f"{_where(line)}: {fault}")
            if self._column_seen or isinstance(line.row, Malformed):
                self._tell_malformed(line, fault)
            else:
                self._hold(line, fault)
        except Rejected as fault:
            self.rejected[fault.reason] += 1
            self.examples.setdefault(fault.reason, f"{_where(line)}: {fault}")
            self._name("line rejected", line, fault)
        return None

    def _look_for_column(self, row: Row) -> None:
        self._columns |= dict.fromkeys(row)
        self._column_seen = self._rules.are_met_by(row)
        if self._column_seen:
            for line, fault in self._held:
                self._tell_malformed(line, fault)
            self._held.clear()

    def _hold(self, line: Line, fault: Malformed) -> None:
        """Told once another row has the column: till then the setting may be what is wrong."""
        self._held.append((line, fault))
        if len(self._held) >= PATIENCE_LINES:
            raise self._no_column() from None

    def _tell_malformed(self, line: Line, fault: Malformed) -> None:
        if self._knobs.strict:
            raise DataError(
                f"{line.file or self.source.name}, line {line.number}: {fault}. Mend the line, or set "
                "producer.strict = false to have such lines counted and left out."
            ) from None
        self._name("line malformed", line, fault)

    def _name(self, text: str, line: Line, fault: Exception) -> None:
        source = line.file or self.source.name
        self.first_fault = self.first_fault or f"{_where(line)}: {fault}"
        if isinstance(fault, Filtered):
            return
        self._num_named[text] += 1
        if self._num_named[text] <= NAMED:
            log.warning(event(text, source=source, line=line.number, why=fault))
        if self._num_named[text] == NAMED:
            log.warning(event("further ones counted only", after=text, source=self.source.name))

    def _no_column(self) -> DataError:
        self._rules.check(self.source.name, list(self._columns))
        line, fault = self._held[0]
        return DataError(
            f"{self.source.name}: each of {len(self._held)} rows lacks a column, or holds null in it. "
            f"The first: line {line.number}: {fault}. Name another one with producer.column or producer.split_column."
        )

    def _nothing(self) -> DataError:
        if not self.lines:
            return DataError(f"{self.source.name} is empty: there is no line in it.")
        return DataError(
            f"{self.source.name}: none of its {self.lines} lines holds a prompt that can be asked. "
            f"The first: {self.first_fault}. docs/data-sets.md shows the accepted shapes."
        )


def _where(line: Line) -> str:
    return f"{line.file}, line {line.number}" if line.file else f"line {line.number}"
