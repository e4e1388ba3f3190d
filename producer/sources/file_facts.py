"""What is known of a file before it is read: size, date, and a hash of its bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from draftfleet.errors import DataError

HASHED_BYTES = 1 << 33
"""Files up to this size get a SHA-256, and are recognised by it: 8 GiB take about 7 s, and minutes to be read."""


def facts_of(path: Path, *, hashed: bool = True) -> dict[str, Any]:
    """`hashed` is False where the files of a source are too large together."""
    facts: dict[str, Any] = {"path": str(path.absolute())}
    if not path.is_file():
        return facts
    stat = path.stat()
    facts |= {"size_bytes": stat.st_size, "modified_at": stat.st_mtime, "sha256": None}
    if hashed and stat.st_size <= HASHED_BYTES:
        try:
            with path.open("rb") as file:
                facts["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"producer.data = {path} cannot be read: {error.strerror}.") from error
    return facts


def is_still(path: Path, facts: dict[str, Any]) -> bool:
    if not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, stat.st_mtime) == (facts["size_bytes"], facts["modified_at"])


def content_of(facts: dict[str, Any]) -> str | None:
    """What tells its content, and how it is read; None where that is unknown."""
    return f"{facts['kind']} {facts['sha256']}" if facts.get("sha256") else None
