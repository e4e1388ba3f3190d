"""curve.json: the figures of a training by step, in the drafter's folder, where any node can read them.

    {"steps": [10, 20, ...], "values": {"loss": [23.6, 13.5, ...], "acceptance_length": [null, 2.31, ...]}}

At most MOST_POINTS of them: where there would be more, every other one goes, from the beginning. It is for
`draftfleet report`; TensorBoard's files have every point, on the node that wrote them.
"""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from draftfleet import drafters
from draftfleet.errors import CorruptFile, StorageError
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage

log = logging.getLogger(__name__)

FILE = "curve.json"
MOST_POINTS = 1000
PUT_S = 10.0
"""It is put anew at most this often."""


class Curve:
    """A tracker that every training has. A storage that refuses costs the reader some points, not the training."""

    def __init__(self, run: Run, drafter: str, step: int) -> None:
        self._run, self._drafter = run, drafter
        self._points = [point for point in _earlier(run, drafter) if point[0] <= step]
        self._put_at = -math.inf
        self._is_told = True

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._points and self._points[-1][0] == step:
            self._points[-1][1].update(values)
        else:
            self._points.append((step, dict(values)))
        if len(self._points) > MOST_POINTS:
            self._points = [point for number, point in enumerate(self._points) if number % 2 or _is_rare(point[1])]
        self._is_told = False
        if time.monotonic() - self._put_at >= PUT_S:
            self._put()

    def close(self) -> None:
        if not self._is_told:
            self._put()

    def _put(self) -> None:
        self._put_at, self._is_told = time.monotonic(), True
        path = f"{self._run.name}/drafters/{self._drafter}/{FILE}"
        try:
            self._run.storage.put(path, (json.dumps(as_columns(self._points)) + "\n").encode())
        except StorageError as error:
            log.warning(event("curve not written", run=self._run.name, drafter=self._drafter, error=error))


def as_columns(points: list[tuple[int, dict[str, float]]]) -> dict[str, Any]:
    """JSON has no infinity: what is not finite is null."""
    names = list(dict.fromkeys(name for _, values in points for name in values))

    def value(values: dict[str, float], name: str) -> float | None:
        found = values.get(name)
        return None if found is None or not math.isfinite(found) else float(f"{found:.6g}")

    return {
        "steps": [step for step, _ in points],
        "values": {name: [value(values, name) for _, values in points] for name in names},
    }


def from_tensorboard(settings: Settings, drafter: str) -> dict[str, Any] | None:
    """The curve of a training of `settings.run` that wrote no curve.json. May raise StorageError or RunError."""
    run = Run.open(open_storage(settings.storage), settings.run)
    return of_tensorboard(run.drafter_dir(drafter) / "tensorboard")


def of_tensorboard(folder: Path) -> dict[str, Any] | None:
    """The same of TensorBoard's files. None where there are none."""
    if not any(folder.glob("events.out.*")):
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": MOST_POINTS})
    events.Reload()
    points: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for one in events.Scalars(name):
            points.setdefault(one.step, {})[name] = one.value
    return as_columns(sorted(points.items()))


def _is_rare(values: dict[str, float]) -> bool:
    """What was measured of a checkpoint is never thinned out."""
    return "acceptance_length" in values


def _earlier(run: Run, drafter: str) -> list[tuple[int, dict[str, float]]]:
    try:
        said = drafters.read(run, drafter, FILE) or {"steps": [], "values": {}}
        columns: dict[str, list[float | None]] = said["values"]
        return [
            (int(step), {name: value for name, some in columns.items() if (value := some[number]) is not None})
            for number, step in enumerate(said["steps"])
        ]
    except (CorruptFile, StorageError, KeyError, TypeError, ValueError, IndexError):
        return []
