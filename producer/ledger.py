"""Which prompts the run holds and which this pass met: ids and hashes, never texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Self

from draftfleet.names import Split
from draftfleet.records import Prompt
from draftfleet.runs import Run
from producer.prompts import overlap_key


class Ledger:
    """About 200 bytes a prompt: a million fit into a quarter of a gigabyte."""

    def __init__(self) -> None:
        self.new = 0
        self.already = 0
        self.duplicates = 0
        self.pass_splits: Counter[Split] = Counter()
        self.run_splits: Counter[Split] = Counter()
        self._held: dict[int, Split] = {}
        self._met: set[int] = set()
        self._train_texts: set[int] = set()
        self._heldout_texts: Counter[int] = Counter()

    @classmethod
    def of(cls, run: Run, batches: Iterable[str]) -> Self:
        """Read the ids from the prompt shards: they are the truth about what an earlier, or killed, pass has added."""
        ledger = cls()
        for batch in batches:
            for prompt in run.read_prompts(batch):
                ledger._hold(prompt)
        return ledger

    def meet(self, prompt: Prompt) -> bool:
        """Count a prompt of this pass. True if the run lacks it: it is to be added, and is held from now on."""
        identity = int(prompt.prompt_id, 16)
        if identity in self._met:
            self.duplicates += 1
            return False
        self._met.add(identity)
        is_new = identity not in self._held
        if is_new:
            self.new += 1
            self._hold(prompt)
        else:
            self.already += 1
        self.pass_splits[self._held[identity]] += 1
        return is_new

    @property
    def overlap(self) -> int:
        """Held-out prompts of the run whose last user turn, normalised, also stands among the train prompts."""
        return sum(count for text, count in self._heldout_texts.items() if text in self._train_texts)

    def _hold(self, prompt: Prompt) -> None:
        self._held[int(prompt.prompt_id, 16)] = prompt.split
        self.run_splits[prompt.split] += 1
        if prompt.split == "train":
            self._train_texts.add(overlap_key(prompt.messages))
        else:
            self._heldout_texts[overlap_key(prompt.messages)] += 1
