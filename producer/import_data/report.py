"""What an import met, as its result tells it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`responses` = `imported` + `already` + `surplus` + `unmatched` + `malformed` + `refused`.

    A line holds one response, or several; a line that cannot be read counts as one. Of the imported rows, `engine` have
    the ids that the file gave, `retokenized` ids made of their text, and `untrained` ids that nothing could be held
    against: they are kept and not trained on. `missing` is what the run still asks for.
    """

    run: str
    run_id: str
    files: list[str]
    forms: dict[str, int]
    lines: int
    responses: int
    imported: int
    already: int
    surplus: int
    unmatched: int
    malformed: int
    refused: int
    refused_for: dict[str, int]
    matched_by: dict[str, int]
    ok: int
    truncated: int
    engine: int
    retokenized: int
    untrained: int
    with_reasoning: int
    missing: int
    batches_done: int
    batches_begun: int
    record: str | None
    seconds: float

    def __post_init__(self) -> None:
        sum_ = self.imported + self.already + self.surplus + self.unmatched + self.malformed + self.refused
        assert self.responses == sum_, self


@dataclass(slots=True)
class Tally:
    """Counts of one reading. `taken` are the responses that have a slot."""

    lines: int = 0
    taken: int = 0
    already: int = 0
    surplus: int = 0
    unmatched: int = 0
    malformed: int = 0
    unchecked: int = 0
    forms: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    matched_by: Counter[str] = field(default_factory=Counter[str])
    kinds: Counter[str] = field(default_factory=Counter[str])

    @property
    def responses(self) -> int:
        lost = self.already + self.surplus + self.unmatched + self.malformed + self.refused.total()
        return self.taken + lost
