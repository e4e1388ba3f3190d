"""The word problems of the corpus: seven small stories with numbers.

Each takes a source of randomness, two names, a kind of thing and three numbers, and uses of them what it needs.
"""

from __future__ import annotations

import random

from words import PLACES

Story = tuple[str, str, int, str]
"""Question, thought, result and explanation of a word problem about `n`, `m` and things called `it`."""


def _gift(rng: random.Random, *, n: str, m: str, it: str, a: int, b: int, c: int) -> Story:
    return (
        f"{n} has {a} {it}. {m} gives {n} {b} more {it}. How many {it} does {n} have now?",
        f"{n} starts with {a} {it}.\n{m} gives {b} more.\nI add them: {a} + {b} = {a + b}.",
        a + b,
        f"{n} had {a} {it} and got {b} more, so {n} has {a} + {b} = {a + b} {it}.",
    )


def _giving_away(rng: random.Random, *, n: str, m: str, it: str, a: int, b: int, c: int) -> Story:
    had = a + b
    return (
        f"{n} had {had} {it} and gave {b} of them to {m}. How many {it} are left?",
        f"{n} starts with {had} {it}.\n{n} gives away {b}.\nI subtract: {had} - {b} = {a}.",
        a,
        f"{n} had {had} {it} and gave {b} away, so {had} - {b} = {a} {it} are left.",
    )


def _boxes(rng: random.Random, *, n: str, m: str, it: str, a: int, b: int, c: int) -> Story:
    b = rng.randint(2, 12)
    return (
        f"There are {c} boxes with {b} {it} in each box. How many {it} are there in total?",
        f"There are {c} boxes.\nEach box has {b} {it}.\nI multiply: {c} * {b} = {c * b}.",
        c * b,
        f"There are {c} boxes of {b} {it}, so there are {c} * {b} = {c * b} {it} in total.",
    )


def _sharing(rng: random.Random, *, n: str, m: str, it: str, a: int, b: int, c: int) -> Story:
    b = rng.randint(2, 12)
    return (
        f"{n} shares {c * b} {it} equally among {c} friends. How many {it} does each friend get?",
        f"There are {c * b} {it}.\nThere are {c} friends.\nI divide: {c * b} / {c} = {b}.",
        b,
        f"{n} divides {c * b} {it} among {c} friends, so each friend gets {c * b} / {c} = {b} {it}.",
    )


def _change(rng: random.Random, *, n: str, m: str, it: str, a: int, b: int, c: int) -> Story:
    b = rng.randint(2, 9)
    cost, paid = b * c, b * c + a
    return (
        f"At the {rng.choice(PLACES)}, {n} buys {b} {it} for {c} dollars each and pays with {paid} dollars. "
        f"How much change does {n} get?",
        f"The cost is {b} * {c} = {cost} dollars.\n{n} pays {paid} dollars.\nThe change is {paid} - {cost} = {a}.",
        a,
        f"The {it} cost {b} * {c} = {cost} dollars. The change is {paid} - {cost} = {a} dollars.",
    )


def _reading(rng: random.Random, *, n: str, m: str, it: str, a: int, b: int, c: int) -> Story:
    days = 7 + b
    return (
        f"{n} reads {c} pages every day. How many pages does {n} read in a week and {b} days?",
        f"A week is 7 days.\n7 + {b} = {days} days.\nI multiply: {c} * {days} = {c * days}.",
        c * days,
        f"A week and {b} days are {days} days. {n} reads {c} * {days} = {c * days} pages.",
    )


def _together(rng: random.Random, *, n: str, m: str, it: str, a: int, b: int, c: int) -> Story:
    b = rng.randint(2, 9)
    both = f"{a} + {a + b} = {2 * a + b}"
    return (
        f"{n} has {a} {it}. {m} has {b} more {it} than {n}. How many {it} do they have together?",
        f"{n} has {a} {it}.\n{m} has {a} + {b} = {a + b} {it}.\nTogether they have {both}.",
        2 * a + b,
        f"{m} has {a} + {b} = {a + b} {it}. Together they have {both} {it}.",
    )


WORD_PROBLEMS = [_gift, _giving_away, _boxes, _sharing, _change, _reading, _together]
