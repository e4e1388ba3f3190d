"""Which prompts the run holds and which this pass met: ids and hashes, never texts."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator

from draftfleet.names import Split
from draftfleet.records import Prompt
from producer.ids import Held

HELDOUT, MET = 1, 2
"""Bits of what is known of a prompt: its split in the run, and whether this pass met it."""


class Ledger:
    """About 100 bytes a prompt: a million fit into a tenth of a gigabyte."""

    def __init__(self) -> None:
        self.new = 0
        self.already = 0
        self.duplicates = 0
        self.pass_splits: Counter[Split] = Counter()
        self.run_splits: Counter[Split] = Counter()
        self.by_source: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """`new`, `already` and `duplicates` of this pass, for each source."""
        self._known: dict[int, int] = {}

    def hold(self, held: Held) -> None:
        """Note what the run holds from before this pass."""
        self._known.update(dict.fromkeys(held.ids, HELDOUT if held.split == "heldout" else 0))
        self.run_splits[held.split] += len(held.ids)

    def meet(self, prompt: Prompt) -> bool:
        """Count a prompt of this pass. True if the run lacks it: it is to be added, and is held from now on."""
        identity = int(prompt.prompt_id, 16)
        known = self._known.get(identity)
        if known is None:
            self._known[identity] = MET | (HELDOUT if prompt.split == "heldout" else 0)
            self.new += 1
            self.by_source[prompt.source]["new"] += 1
            self.run_splits[prompt.split] += 1
            self.pass_splits[prompt.split] += 1
            return True
        if known & MET:
            self.duplicates += 1
            self.by_source[prompt.source]["duplicates"] += 1
            return False
        self._known[identity] = known | MET
        self.already += 1
        self.by_source[prompt.source]["already"] += 1
        self.pass_splits["heldout" if known & HELDOUT else "train"] += 1
        return False

    def row_keys(self, samples: int) -> Iterator[str]:
        """Of every row of the run. All turns of a conversation draw alike, so they stand as its first."""
        for identity in self._known:
            yield from (f"{identity:032x}-{number}-0" for number in range(samples))


class Overlap:
    """Held-out prompts whose last user turn, normalised, also stands among the train prompts. 8 bytes a prompt."""

    def __init__(self) -> None:
        self._train = array("q")
        self._heldout: Counter[int] = Counter()

    def add(self, held: Held) -> None:
        if held.split == "train":
            self._train.extend(held.texts)
        else:
            self._heldout.update(held.texts)

    def count(self) -> int:
        shared = {text for text in self._train if text in self._heldout}
        return sum(self._heldout[text] for text in shared)
