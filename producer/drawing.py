"""Some prompts of many, drawn as they stream by: the same ones for the same seed, whatever their order and format.

A hash gives each prompt a number from the seed and its id; those with the smallest numbers are drawn. So a larger
sample of the same seed holds the smaller one, and of a data set that grew most stay. Memory is some 200 bytes a drawn
prompt; texts wait in a file that is gone afterwards.
"""

from __future__ import annotations

import hashlib
import heapq
import tempfile
import zlib
from collections.abc import Iterable, Iterator

from draftfleet.records import Prompt


class Draw:
    """Iterate once over what is drawn of `prompts`, in their order, no prompt twice.

    `duplicates` came again while they were among the drawn ones; `num_left_out` are all others that were not drawn.
    """

    def __init__(self, prompts: Iterable[Prompt], size: int, seed: int) -> None:
        self.duplicates = 0
        self.num_met = 0
        self._prompts = prompts
        self._size = size
        self._seed = f"{seed}:".encode()
        self._drawn: list[tuple[int, int, int]] = []
        """A heap of (minus the number, place in the file, bytes there): the largest number comes first."""
        self._numbers: set[int] = set()

    def __iter__(self) -> Iterator[Prompt]:
        with tempfile.TemporaryFile(prefix="draftfleet-sample-") as file:
            for prompt in self._prompts:
                number = self._number(prompt)
                if number in self._numbers:
                    self.duplicates += 1
                    continue
                self.num_met += 1
                if len(self._drawn) == self._size and number > -self._drawn[0][0]:
                    continue
                place = file.tell()
                self._enter(number, place, file.write(zlib.compress(prompt.to_json().encode("utf-8"), 1)))
            for _, place, length in sorted(self._drawn, key=lambda entry: entry[1]):
                file.seek(place)
                yield Prompt.from_json(zlib.decompress(file.read(length)).decode())

    @property
    def num_left_out(self) -> int:
        return self.num_met - len(self._drawn)

    def _number(self, prompt: Prompt) -> int:
        digest = hashlib.blake2b(self._seed + prompt.prompt_id.encode(), digest_size=16).digest()
        return int.from_bytes(digest, "big")

    def _enter(self, number: int, place: int, length: int) -> None:
        self._numbers.add(number)
        if len(self._drawn) < self._size:
            heapq.heappush(self._drawn, (-number, place, length))
        else:
            largest, _, _ = heapq.heapreplace(self._drawn, (-number, place, length))
            self._numbers.discard(-largest)
