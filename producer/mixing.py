"""Several streams by turns: each has its share of what is taken, as even as can be, and the same order every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal, TypeVar

T = TypeVar("T")


def by_turns(
    streams: Sequence[Iterator[T]], weights: Sequence[float] | None, until: Literal["first", "all"]
) -> Iterator[T]:
    """From the stream that is furthest behind its share, the first of equals. Without weights all weigh the same.

    With `first` it ends when the stream whose turn it is has ended, so that the shares hold to the end; with `all` the
    others go on among themselves.

    Weights 2 and 1 over streams a and b: a b a a b a a b a ...
    """
    if len(streams) == 1:
        yield from streams[0]
        return
    steps = [1 / Fraction(weight) for weight in weights or [1] * len(streams)]
    due = [step / 2 for step in steps]
    """When each is to be taken next. Half a step at the start puts the rare ones in the middle of the others."""
    open_streams = list(range(len(streams)))
    while open_streams:
        place = min(open_streams, key=due.__getitem__)
        try:
            taken = next(streams[place])
        except StopIteration:
            if until == "first":
                return
            open_streams.remove(place)
            continue
        due[place] += steps[place]
        yield taken
