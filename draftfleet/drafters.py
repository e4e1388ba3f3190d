"""The drafters of a run as all nodes see them: their names, their JSON files, and the parts that are finished."""

from __future__ import annotations

import json
from typing import Any, cast

from draftfleet.errors import CorruptFile
from draftfleet.runs import Run


def names(run: Run) -> list[str]:
    """Of the drafters that were asked for, in order."""
    return sorted(run.storage.folders(f"{run.name}/drafters"))


def read(run: Run, drafter: str, file: str) -> dict[str, Any] | None:
    """A JSON file of a drafter; None if it is not there. Raises CorruptFile."""
    path = _path(run, drafter, file)
    try:
        return cast(dict[str, Any], json.loads(run.storage.read(path)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptFile(f"{run.storage.url}/{path} cannot be read: {error}. Restore it from a copy.") from None


def unfinished(run: Run) -> list[str]:
    """Those that were asked for and whose training has not come to its end."""
    asked = [name for name in names(run) if run.storage.exists(_path(run, name, "drafter-settings.json"))]
    return [name for name in asked if not _is_finished(run, name)]


def share(run: Run, drafter: str, part: str) -> None:
    """A subfolder of the drafter's folder on this node is finished: let all nodes see it as it is here."""
    run.storage.share(_path(run, drafter, part))


def fetch(run: Run, drafter: str, part: str) -> None:
    """Bring what other nodes have finished of a subfolder of the drafter's folder."""
    run.storage.fetch(_path(run, drafter, part))


def _is_finished(run: Run, drafter: str) -> bool:
    try:
        progress = read(run, drafter, "progress.json")
    except CorruptFile:
        return False
    return bool(progress and progress.get("finished"))


def _path(run: Run, drafter: str, part: str) -> str:
    return f"{run.name}/drafters/{drafter}/{part}"
