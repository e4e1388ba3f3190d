"""The answers as one JSON Lines file that a person reads: messages, reasoning, answer, without token ids."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from draftfleet.errors import SettingsError, StorageUnwritable
from draftfleet.export_data.kept import Kept
from draftfleet.export_data.units import Wanted, line_of, units_of
from draftfleet.names import Split
from draftfleet.runs import Run

FIELDS = ("key", "prompt_id", "sample", "split", "turn", "messages", "tools", "reasoning", "content", "tool_calls")
OUTCOME = ("outcome", "finish_reason", "model")
AS = {"content": "answer"}
"""Under which name it stands here, where that is another one."""

IF_SET = ("tools", "tool_calls")


def check(file: Path) -> None:
    """Before a long run: whether the file may be written. Raises SettingsError."""
    try:
        staged = _staged(file)
        staged.touch(exist_ok=False)
        staged.unlink()
    except OSError as error:
        raise SettingsError(
            f"--jsonl {file} cannot be written: {error.strerror}. Name a file in a folder that is there and yours."
        ) from None


def write(run: Run, file: Path) -> tuple[int, list[str]]:
    """All answers of the run, each once, train before heldout. Returns how many, and the shards that are corrupt.

    The file takes its place when it is whole. Raises StorageUnwritable.
    """
    staged, count, kept = _staged(file), 0, Kept(run)
    try:
        with staged.open("w", encoding="utf-8") as out:
            for line in _lines(kept):
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
            out.flush()
            os.fsync(out.fileno())
        staged.replace(file)
    except OSError as error:
        raise StorageUnwritable(
            f"could not write --jsonl {file}: {error.strerror}. The samples are kept: make room or make it writable, "
            "and give the same command again."
        ) from error
    finally:
        staged.unlink(missing_ok=True)
    return count, sorted(kept.corrupt)


def _lines(kept: Kept) -> Iterator[dict[str, Any]]:
    wanted, left_out = Wanted(), Counter[str]()
    for split in get_args(Split):
        for samples in kept.batches(split):
            for sample in samples:
                for unit in units_of(sample, wanted, needs_ids=False, left_out=left_out):
                    yield _readable(line_of(unit, wanted))


def _readable(line: dict[str, Any]) -> dict[str, Any]:
    return {
        AS.get(name, name): line[name] for name in (*FIELDS, *OUTCOME) if line[name] is not None or name not in IF_SET
    }


def _staged(file: Path) -> Path:
    return file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.part")
