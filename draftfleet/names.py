"""Names: of runs, of batches, of batches that ask rows again, and of the single rows of a batch that was split."""

from __future__ import annotations

import re
from typing import Literal, cast

Split = Literal["train", "heldout"]

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Names of runs, batches and drafters: they become file names, so they can hold no path."""
NAME_RULE = "letters, digits, . _ -, at most 100, beginning with a letter or digit"
"""The same for a person."""

BATCH = r"^(train|heldout)(-again)?-[0-9]{6,12}(\.[0-9]{4,9})?$"
"""Names of batches, of those that ask rows again, and of the rows of one that was split (`parts_of`)."""


def batch_id(split: Split, number: int) -> str:
    return f"{split}-{number:06d}"


def again_id(split: Split, number: int) -> str:
    """`train-again-000002`: a batch of rows that other batches had asked before (draftfleet.again)."""
    return f"{split}-again-{number:06d}"


def is_again(batch: str) -> bool:
    return batch.partition("-")[2].startswith("again-")


def parts_of(batch: str, num_rows: int | None) -> list[str]:
    """The batches that stand for `batch`: itself, or one per row once it was split into `num_rows`."""
    return [batch] if num_rows is None else [f"{batch}.{row:04d}" for row in range(num_rows)]


def parent_of(batch: str) -> tuple[str, int | None]:
    """`train-000007.0003` is row 3 of `train-000007`; a whole batch has no row."""
    parent, dot, row = batch.partition(".")
    return parent, int(row) if dot else None


def split_of(batch: str) -> Split:
    return cast(Split, batch.partition("-")[0])


def imported_partial(process: str) -> str:
    """How the name of a partial begins that an import wrote. The batch of all its rows follows."""
    return f"imported.{process}"


def batch_of_partial(name: str) -> str | None:
    """The batch of all rows of a partial, where its name says so."""
    found = re.fullmatch(r"imported\.[0-9a-f]+\.([a-z-]+[0-9]{6,12})-[0-9]{6}\.jsonl", name)
    return found[1] if found else None
