"""What a row draws where a run asks in several ways: a variant of its mixture, thinking on or off.

Both are read from a hash of the row's key, so that they are the same on every node, in any order and after a resume,
and a later look needs no record to know them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from pydantic import ValidationError

import draftfleet
from draftfleet.errors import RunError
from draftfleet.runs import Run
from draftfleet.settings import Sampling

ON_FIRST = {True: 0, False: 1, None: 2}
"""In this order a server tries what a run asks: a thought shows most."""


class Way(NamedTuple):
    """One of the ways in which a run asks: its share of the rows, and what they draw."""

    share: float
    drawn: dict[str, Any]


def model(run: Run) -> str:
    """The target's name that the run pins. Raises RunError."""
    try:
        return str(run.info.content["target.model"])
    except KeyError as error:
        raise _of_another_version(run, error) from None


def asked(run: Run) -> Sampling:
    """What the run pins. Raises RunError if a version made it that pins what this one does not know."""
    prefix = "sampling."
    pinned = {key.removeprefix(prefix): value for key, value in run.info.content.items() if key.startswith(prefix)}
    try:
        return Sampling(**pinned)
    except ValidationError as error:
        raise _of_another_version(run, error) from None


def drawn(sampling: Sampling, row_key: str) -> tuple[Sampling, dict[str, Any]]:
    """What this row is asked with, with neither a mixture nor a share left in it, and what of it was drawn."""
    if not _has_choice(sampling):
        return sampling, {}
    dice = _Dice(sampling)
    values = dice.values(*dice.throw(row_key))
    return _without_choice(sampling, values), values


def ways(sampling: Sampling) -> list[Way]:
    """All ways in which rows may be asked, with the share of each; one with nothing drawn where there is no choice."""
    total = sum(one.weight for one in sampling.mixture)
    mixed = [Way(one.weight / total, one.asked()) for one in sampling.mixture if one.weight] or [Way(1.0, {})]
    if sampling.thinking_share is None:
        return mixed
    switches = [(True, sampling.thinking_share), (False, 1 - sampling.thinking_share)]
    return [Way(way.share * share, way.drawn | {"thinking": on}) for way in mixed for on, share in switches if share]


def count(sampling: Sampling, row_keys: Iterable[str]) -> list[dict[str, Any]]:
    """How many of these rows draw each way: `[{"thinking": true, "rows": 51}, ...]`. Empty where there is no choice."""
    if not _has_choice(sampling):
        return []
    dice = _Dice(sampling)
    rows = Counter[str]()
    for thrown, times in Counter(map(dice.throw, row_keys)).items():
        rows[_name(dice.values(*thrown))] += times
    named = {_name(way.drawn): way.drawn for way in ways(sampling)}
    return [way | {"rows": rows[name]} for name, way in named.items()]


def to_try(sampling: Sampling) -> list[Sampling]:
    """What a server has to be tried with before it gets rows: one way for each kind of thinking, the longest of it."""
    found: dict[tuple[bool | None, str | None], Sampling] = {}
    for way in ways(sampling):
        one = _without_choice(sampling, way.drawn)
        kind = one.thinking, one.reasoning_effort
        if kind not in found or one.max_tokens > found[kind].max_tokens:
            found[kind] = one
    return [found[kind] for kind in sorted(found, key=lambda kind: ON_FIRST[kind[0]])]


class _Dice:
    """Of one run, made ready for many rows."""

    def __init__(self, sampling: Sampling) -> None:
        drawable = [one for one in sampling.mixture if one.weight]
        self._variants = [one.asked() for one in drawable]
        self._ends = list(accumulate(one.weight for one in drawable))
        self._share = sampling.thinking_share

    def throw(self, row_key: str) -> tuple[int, bool | None]:
        """The number of a variant, and whether thinking is on; None where only the variant decides."""
        key = row_key.rpartition("-")[0]  # all turns of a conversation are asked in one way
        variant = 0
        if self._ends:
            # min: the product of two floats may round up to the end itself.
            variant = min(bisect_right(self._ends, _uniform("mixture", key) * self._ends[-1]), len(self._ends) - 1)
        return variant, None if self._share is None else _uniform("thinking", key) < self._share

    def values(self, variant: int, thinking: bool | None) -> dict[str, Any]:
        values = dict(self._variants[variant]) if self._variants else {}
        return values if thinking is None else values | {"thinking": thinking}


def _has_choice(sampling: Sampling) -> bool:
    return bool(sampling.mixture) or sampling.thinking_share is not None


def _without_choice(sampling: Sampling, values: dict[str, Any]) -> Sampling:
    return sampling.model_copy(update={"mixture": [], "thinking_share": None} | values)


def _of_another_version(run: Run, error: Exception) -> RunError:
    return RunError(
        f"run {run.name} was made by draftfleet {run.info.product_version} and cannot be read by "
        f"{draftfleet.__version__}: use the same version on every node ({error})."
    )


def _uniform(what: str, key: str) -> float:
    """In [0, 1), by 53 bits of a hash; independent for each `what`, and of the row's seed and split."""
    return (int.from_bytes(hashlib.sha256(f"{what}:{key}".encode()).digest()[:8]) >> 11) / 2**53


def _name(values: dict[str, Any]) -> str:
    return repr(sorted(values.items()))
