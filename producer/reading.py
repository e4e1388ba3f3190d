"""One pass over the data sets: their prompts, and a count of every line that was none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from draftfleet import settings
from draftfleet.records import Prompt
from producer.chosen import chosen
from producer.filters import CountTokens
from producer.mixing import by_turns
from producer.part import NAMED, PATIENCE_LINES, Allowance, Part
from producer.sources import Mixture, Source

__all__ = ["NAMED", "PATIENCE_LINES", "Reading"]


class Reading:
    """Iterate once. In the end `lines` = prompts yielded + `duplicates` + `malformed` + the sum of `rejected`.

    `duplicates` are those that were met while a sample was drawn; others are told by the ledger. `parts` has the same
    counts for each source. Raises DataError where a source breaks off, holds no prompt at all, or, with `strict`, has
    a malformed line.
    """

    def __init__(self, source: Source, knobs: settings.Producer, count_tokens: CountTokens | None = None) -> None:
        self.source = source
        self._knobs = knobs
        self._sources = chosen(knobs)
        opened = source.parts if isinstance(source, Mixture) else [source]
        allowed = Allowance(knobs.limit if knobs.sources else None)
        self.parts = [
            Part(one, named, knobs, allowed, count_tokens) for one, named in zip(opened, self._sources, strict=True)
        ]

    @property
    def lines(self) -> int:
        return sum(part.lines for part in self.parts)

    @property
    def malformed(self) -> int:
        return sum(part.malformed for part in self.parts)

    @property
    def duplicates(self) -> int:
        return sum(part.duplicates for part in self.parts)

    @property
    def rejected(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for part in self.parts:
            total.update(part.rejected)
        return total

    @property
    def examples(self) -> dict[str, str]:
        """The first line of each kind of fault."""
        return {kind: said for part in reversed(self.parts) for kind, said in part.examples.items()}

    def __iter__(self) -> Iterator[Prompt]:
        weights = [one.weight for one in self._sources if one.weight is not None]
        until = self._knobs.until or ("first" if weights else "all")
        num_prompts = 0
        for prompt in by_turns([iter(part) for part in self.parts], weights or None, until):
            num_prompts += 1
            yield prompt
        assert self.lines == num_prompts + self.duplicates + self.malformed + self.rejected.total()
